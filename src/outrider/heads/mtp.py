"""Multi-token prediction modules under the names of DeepSeek-V3 and of MiMo, alone or within their target's checkpoint.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. Of several modules the first is used, at every depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.core.errors import HeadMismatchError
from outrider.heads.base import Files, Layout
from outrider.heads.draft_ids import ascending, read_offsets, written_offsets
from outrider.heads.head import Head
from outrider.heads.names import Table, public_tensors, read_tensors
from outrider.heads.values import OWN, model_of, own_value, read_config, written
from outrider.models.config import EMBEDDING, OUTPUT, Fusion

if TYPE_CHECKING:
    from outrider.heads.checkpoint import Checkpoint
    from outrider.models.config import ModelConfig

_FUSE = "model.fuse.weight"
_SHAPE = ("hidden_size", "vocab_size", "num_hidden_layers")


class MtpLayout(Layout):
    """DeepSeek's: ``model.layers.N`` for a target of N layers, whose matrix joins [embedding, feature]."""

    methods = ("mtp",)
    table: Table = (
        ("enorm.", "model.embed_norm."),
        ("hnorm.", "model.feature_norm."),
        ("eh_proj.", "model.fuse."),
        ("shared_head.norm.", "model.norm."),
        ("shared_head.head.", "lm_head."),
        ("embed_tokens.", "model.embed_tokens."),
        ("", "model.layers.0."),
    )
    marks = re.compile(r"(.*layers\.\d+\.)eh_proj\.weight")

    def method(self, checkpoint: Checkpoint) -> str | None:
        return "mtp" if self._modules(checkpoint) else None

    def read(self, checkpoint: Checkpoint, target: ModelConfig) -> Head:
        where, values = str(checkpoint.path), checkpoint.values
        tensors = self._tensors(checkpoint)
        config = _config(values, tensors, target, where)
        hidden, vocabulary, layers = (
            value if isinstance(value := values.get(key), int) else default
            for key, default in zip(_SHAPE, (target.hidden_size, target.vocab_size, target.num_layers), strict=True)
        )
        ids = ascending(read_offsets(checkpoint, vocabulary), vocabulary, tensors, (OUTPUT,))
        return Head(
            method="mtp",
            hidden_size=hidden,
            num_layers=own_value(values, "target_num_layers", layers, where),
            vocab_size=vocabulary,
            feature_layers=(target.num_layers,),
            normed=True,
            draft_ids=ids,
            tensors=tensors,
            config=replace(config, logits_size=None if ids is None else len(ids)),
            source=where,
        )

    def write(self, head: Head) -> Files:
        config = model_of(head, kind="project", first_norm=True, final_norm=True)
        if config.num_layers != 1:
            raise HeadMismatchError(f"{head.label}: an mtp module has one layer, not {config.num_layers}")
        values = written(head, config) | {"num_hidden_layers": head.num_layers, "num_nextn_predict_layers": 1}
        prefix = self._prefix(head)
        tensors = {prefix + name: tensor for name, tensor in public_tensors(head.tensors, self.table).items()}
        return Files(values, {**tensors, **written_offsets(head)})

    def _prefix(self, head: Head) -> str:
        return f"model.layers.{head.num_layers}."

    def _modules(self, checkpoint: Checkpoint) -> list[str]:
        """Beginnings of the names of each module, the first module first."""
        found = [match[1] for match in map(self.marks.fullmatch, checkpoint.names) if match]
        return sorted(found, key=lambda prefix: (len(prefix), prefix))

    def _tensors(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        return read_tensors(checkpoint, self.table, prefix=self._modules(checkpoint)[0])


class MimoLayout(MtpLayout):
    """MiMo's: ``model.mtp_layers.0``, whose matrix joins [feature, embedding]; embedding and output: the target's."""

    table: Table = (
        ("token_layernorm.", "model.embed_norm."),
        ("hidden_layernorm.", "model.feature_norm."),
        ("input_proj.", "model.fuse."),
        ("final_layernorm.", "model.norm."),
        ("", "model.layers.0."),
    )
    marks = re.compile(r"(.*mtp_layers\.\d+\.)input_proj\.weight")

    def write(self, head: Head) -> Files:
        for name in (EMBEDDING, OUTPUT):
            if name in head.tensors:
                raise HeadMismatchError(
                    f"{head.label}: MiMo's layout has no place for a matrix {name!r} of the drafter's "
                    "own; write layout 'mtp'"
                )
        files = super().write(head)
        name = self._prefix(head) + "input_proj.weight"
        values = {**files.values, "model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        return Files(values, {**files.tensors, name: _swapped(files.tensors[name])})

    def _prefix(self, head: Head) -> str:
        return "model.mtp_layers.0."

    def _tensors(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        tensors = super()._tensors(checkpoint)
        return {**tensors, _FUSE: _swapped(tensors[_FUSE])}


def _swapped(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.ndim != 2:
        return matrix  # no matrix at all, which `Head.check_tensors` says better
    return torch.cat(matrix.tensor_split(2, dim=1)[::-1], dim=1)


def _config(
    values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: ModelConfig, where: str
) -> ModelConfig:
    """A module is a block like its target's, unless it was written here, where config.json says what it is like."""
    fusion = Fusion("project", norms=True)
    if OWN in values:
        return replace(read_config(values, tensors, target, where, fusion=fusion, final_norm=True), num_layers=1)
    return replace(
        target,
        family="llama",
        num_layers=1,
        tie_embeddings=False,
        sliding_window=None,
        window_layers=(),
        no_rope_layers=(),
        fusion=fusion,
    )
