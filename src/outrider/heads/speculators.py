"""The format of vLLM's speculators: a config.json that nests the layer's configuration.

EAGLE-3 is read and written, EAGLE-1 is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.core.errors import ModelFileError, UnsupportedModelError
from outrider.heads.base import Files, Layout
from outrider.heads.draft_ids import written_offsets
from outrider.heads.eagle import read_eagle
from outrider.heads.eagle3 import NUMBERED_TABLE, fusion_values, read_eagle3
from outrider.heads.names import public_tensors
from outrider.heads.values import OWN, model_of, written

if TYPE_CHECKING:
    from outrider.heads.checkpoint import Checkpoint
    from outrider.heads.head import Head
    from outrider.models.config import ModelConfig

_KIND = "speculators_model_type"
_LAYER = "transformer_layer_config"
_EAGLE_TABLE = (
    ("fusion_fc.", "model.fuse."),
    ("transformer.", "model.layers.0."),
    ("embed_tokens.", "model.embed_tokens."),
)
_PROPOSED = 5
"""Tokens a round that config.json suggests to vLLM, which insists on a number."""


class SpeculatorsLayout(Layout):
    """Told by ``speculators_model_type``."""

    methods = ("eagle3",)

    def method(self, checkpoint: Checkpoint) -> str | None:
        kind = checkpoint.values.get(_KIND)
        if kind is not None and kind not in ("eagle3", "eagle"):
            raise UnsupportedModelError(f"{checkpoint.path}: {_KIND}={kind!r} is not supported; eagle3 and eagle are")
        return kind

    def read(self, checkpoint: Checkpoint, target: ModelConfig) -> Head:
        where, outer = str(checkpoint.path), checkpoint.values
        layer = outer.get(_LAYER)
        if not isinstance(layer, dict):
            raise ModelFileError(f"{where}: {_LAYER} is missing from config.json")
        values: dict[str, Any] = {**outer, **layer}
        if outer[_KIND] == "eagle":
            if outer.get("layernorms"):
                raise UnsupportedModelError(f"{where}: layernorms=true, a variant of EAGLE-1, is not supported")
            return read_eagle(checkpoint, {**values, "num_hidden_layers": 1}, _EAGLE_TABLE, target)
        if "norm_before_residual" not in outer:
            raise ModelFileError(f"{where}: norm_before_residual is missing from config.json; say whether it is so")
        return read_eagle3(checkpoint, values, target)

    def write(self, head: Head) -> Files:
        config = model_of(head, kind="attend", first_norm=False, final_norm=True)
        layer = written(head, config)
        own = layer.pop(OWN)
        values = {
            "architectures": ["Eagle3Speculator"],
            _KIND: "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": _PROPOSED,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": None, "architectures": []},
            },
            _LAYER: layer,
            "torch_dtype": layer["torch_dtype"],
            **fusion_values(head),
            OWN: own,
        }
        return Files(values, {**public_tensors(head.tensors, NUMBERED_TABLE), **written_offsets(head)})
