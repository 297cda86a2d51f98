"""The format of vLLM's speculators: a config.json that nests the layer's configuration.

Li et al.'s EAGLE-3, and EAGLE-1 as far as the format goes: one block that borrows the target's embedding and output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.core.errors import HeadMismatchError, ModelFileError, UnsupportedModelError
from outrider.heads.base import Files, Layout
from outrider.heads.draft_ids import written_offsets
from outrider.heads.eagle import read_eagle
from outrider.heads.eagle3 import NUMBERED_TABLE, fusion_values, read_eagle3
from outrider.heads.names import public_tensors
from outrider.heads.values import OWN, model_of, written
from outrider.models.config import EMBEDDING, OUTPUT

if TYPE_CHECKING:
    from outrider.heads.checkpoint import Checkpoint
    from outrider.heads.head import Head
    from outrider.models.config import ModelConfig

_KIND = "speculators_model_type"
_LAYER = "transformer_layer_config"
_BLOCK = "LlamaDecoderLayer"
_BIAS = "fusion_bias"
_EAGLE_TABLE = (
    ("fusion_fc.", "model.fuse."),
    ("transformer.", "model.layers.0."),
    ("embed_tokens.", "model.embed_tokens."),
)
_PROPOSED = 5
"""Tokens a round that config.json suggests to vLLM, which insists on a number."""


class SpeculatorsLayout(Layout):
    """Told by ``speculators_model_type``."""

    methods = ("eagle3", "eagle")

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
        eagle = head.method == "eagle"
        kind = "project" if eagle else "attend"
        config = model_of(head, kind=kind, first_norm=False, final_norm=not eagle)
        if eagle:
            _check_is_plain(head, config)
        layer = written(head, config)
        own = layer.pop(OWN)
        values = {
            "architectures": ["EagleSpeculator", _BLOCK] if eagle else ["Eagle3Speculator"],
            _KIND: head.method,
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": head.method,
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
            **(_eagle_values(config) if eagle else fusion_values(head)),
            OWN: own,
        }
        table = _EAGLE_TABLE if eagle else NUMBERED_TABLE
        return Files(values, {**public_tensors(head.tensors, table), **written_offsets(head)})


def _eagle_values(config: ModelConfig) -> dict[str, Any]:
    """Keys of EAGLE-1 beyond the block's."""
    bias = config.fusion is not None and config.fusion.bias
    return {"transformer_layer_architecture": _BLOCK, "layernorms": False, _BIAS: bias}


def _check_is_plain(head: Head, config: ModelConfig) -> None:
    """Raise HeadMismatchError for what the format's EAGLE-1 has no place for: it is one block between two matrices of
    the target.
    """
    normed = config.fusion is not None and config.fusion.norms
    for found, what in (
        (config.num_layers != 1, f"{config.num_layers} blocks"),
        (normed, "norms of the embedding and the feature"),
        (config.qk_norm, "norms of queries and keys"),
        (head.draft_ids is not None, "a reduced vocabulary"),
        (OUTPUT in head.tensors, "an output matrix"),
        (EMBEDDING in head.tensors, "an embedding"),
    ):
        if found:
            raise HeadMismatchError(
                f"{head.label}: EAGLE-1 in the speculators format has no place for {what}; write layout 'eagle'"
            )
