"""EAGLE-1 checkpoints, as the authors and vLLM know them, and as SGLang does.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024). The first layer has no norm
before its attention, and the target's output matrix is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outrider.core.errors import HeadMismatchError
from outrider.heads.base import Files, Layout
from outrider.heads.draft_ids import MASK, OFFSETS, ascending, read_offsets, written_offsets
from outrider.heads.head import Head
from outrider.heads.names import Table, public_tensors, read_tensors
from outrider.heads.values import model_of, own_value, read_config, written
from outrider.models.config import OUTPUT, Fusion

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from outrider.heads.checkpoint import Checkpoint
    from outrider.models.config import ModelConfig

TABLE: Table = (
    ("fc.", "model.fuse."),
    ("embedding_layernorm.", "model.embed_norm."),
    ("hidden_states_layernorm.", "model.feature_norm."),
    ("layers.", "model.layers."),
    ("embed_tokens.", "model.embed_tokens."),
)
"""The two norms are HASS's (``add_para_norm``); EAGLE itself has none."""

_BIAS = "model.fuse.bias"


class EagleLayout(Layout):
    """``LlamaForCausalLM`` in config.json, from which vLLM makes a name of its own."""

    methods = ("eagle",)

    def method(self, checkpoint: Checkpoint) -> str | None:
        found = [name for name in ("fc.weight", "model.fc.weight") if name in checkpoint]
        shape = checkpoint.shape(found[0]) if found else ()
        return "eagle" if len(shape) == 2 and shape[1] == 2 * shape[0] else None

    def read(self, checkpoint: Checkpoint, target: ModelConfig) -> Head:
        prefix = "model." if "model.fc.weight" in checkpoint else ""
        table = tuple((prefix + public, canonical) for public, canonical in TABLE)
        return read_eagle(checkpoint, checkpoint.values, table, target)

    def write(self, head: Head) -> Files:
        config = model_of(head, kind="project", first_norm=False, final_norm=False)
        values = written(head, config) | {"architectures": ["LlamaForCausalLM"]}
        if config.fusion is not None:
            values |= {"bias": config.fusion.bias, "add_para_norm": config.fusion.norms}
        return Files(values, {**public_tensors(head.tensors, TABLE), **written_offsets(head)})


class SGLangEagleLayout(EagleLayout):
    """As SGLang takes it: another architecture's name, and always a bias."""

    def write(self, head: Head) -> Files:
        if head.draft_ids is not None:
            raise HeadMismatchError(
                f"{head.label}: SGLang's layout of EAGLE-1 has no reduced vocabulary; write layout "
                "'eagle', or give SGLang the ids as --speculative-token-map"
            )
        files = super().write(head)
        tensors = {"fc.bias": torch.zeros(files.tensors["fc.weight"].shape[0]).to(files.tensors["fc.weight"])}
        return Files(
            {**files.values, "architectures": ["LlamaForCausalLMEagle"], "bias": True}, {**tensors, **files.tensors}
        )


def read_eagle(checkpoint: Checkpoint, values: Mapping[str, Any], table: Table, target: ModelConfig) -> Head:
    """A head whose configuration is ``values``, and whose tensors have the names of ``table``."""
    where = str(checkpoint.path)
    tensors = read_tensors(checkpoint, table, without=(OFFSETS, MASK))
    if _BIAS in tensors and not tensors[_BIAS].any():
        del tensors[_BIAS]  # what `SGLangEagleLayout` adds
    fusion = Fusion("project", norms="model.embed_norm.weight" in tensors, bias=_BIAS in tensors)
    config = read_config(values, tensors, target, where, fusion=fusion, final_norm=False)
    ids = ascending(read_offsets(checkpoint, config.vocab_size), config.vocab_size, tensors, (OUTPUT,))
    return Head(
        method="eagle",
        hidden_size=config.hidden_size,
        num_layers=own_value(values, "target_num_layers", target.num_layers, where),
        vocab_size=config.vocab_size,
        feature_layers=(target.num_layers,),
        normed=True,
        draft_ids=ids,
        tensors=tensors,
        config=replace(config, logits_size=None if ids is None else len(ids)),
        source=where,
    )
