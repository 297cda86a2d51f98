"""What a learned drafter is, whatever file it came from: a small model or a stack of layers, under canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.core.errors import HeadMismatchError
from outrider.models.config import EMBEDDING, OUTPUT, ModelConfig, weight_shapes

if TYPE_CHECKING:
    import torch

METHODS = ("eagle", "eagle3", "mtp", "medusa")

FEATURES = "features.weight"
"""EAGLE-3's ``fc`` [H, layers * target's H]: joins the target's hidden states to one feature."""


@dataclass(frozen=True)
class Head:
    """A learned drafter of one target.

    method: one of METHODS. hidden_size, num_layers, vocab_size: of the target it was trained for.
    feature_layers: the target's hidden states that it reads, numbered as in `ForwardOutput.hidden`.
    normed: they are read after the target's final norm (then there is one layer, the last).
    draft_ids: [D] int64, ascending: the target's id of each column of its logits; None: all of the vocabulary.

    config: for all but Medusa, the model that runs (`ModelConfig.fusion` is set; ``vocab_size`` is the target's,
    ``logits_size`` is D). Its own hidden state after the last block is the feature of the next row.
    accept_by_depth: how often its guess k tokens ahead was the target's likeliest token where those before it were, on
    texts held out from training; empty: not measured.
    accept_by_rank: Medusa's; for each head, how often its r-th best guess was that token (r = 0, 1, …), on the same
    texts and whatever the heads before it guessed; empty: not measured.
    tensors: by the names of `weight_shapes`, and FEATURES where several layers are joined. What is missing of EMBEDDING
    and OUTPUT is the target's, of OUTPUT the rows ``draft_ids``.

    Medusa has no config. Its tensors, for head k = 0, 1, … (which guesses the token k + 2 places after the feature's)
    and block i of it: ``heads.{k}.blocks.{i}.weight`` [H, H] and ``.bias`` [H], x + silu(W x + b); then
    ``heads.{k}.output.weight`` [D or V, H], or one OUTPUT for all of them, or the target's.
    """

    method: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    feature_layers: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]
    normed: bool = False
    draft_ids: torch.Tensor | None = None
    config: ModelConfig | None = None
    accept_by_depth: tuple[float, ...] = ()
    accept_by_rank: tuple[tuple[float, ...], ...] = ()
    source: str = field(default="", compare=False)
    """Where it was read from, for messages."""

    def check_fits(self, target: ModelConfig, name: str) -> None:
        """Raise HeadMismatchError unless it was trained for a target of this shape. name: the target's."""
        for what, own, wanted in (
            ("hidden size", self.hidden_size, target.hidden_size),
            ("number of layers", self.num_layers, target.num_layers),
            ("vocabulary size", self.vocab_size, target.vocab_size),
        ):
            if own != wanted:
                raise HeadMismatchError(
                    f"{self.label}: made for a target with {what} {own}, but {name} has {wanted}; "
                    "name a drafter that was trained for it, or train one with 'outrider train'"
                )

    def check_tensors(self) -> None:
        """Raise HeadMismatchError for a tensor that is missing, of the wrong shape or without a place."""
        if self.config is not None and self.config.num_layers > len(self.tensors):
            raise HeadMismatchError(
                f"{self.label}: {self.config.num_layers} blocks are said to be there, in {len(self.tensors)} tensors"
            )
        wanted = dict(weight_shapes(self.config)) if self.config is not None else self._medusa_shapes()
        if len(self.feature_layers) > 1 and self.config is not None:
            wanted[FEATURES] = (self.config.hidden_size, len(self.feature_layers) * self.hidden_size)
        for name, tensor in self.tensors.items():
            if name not in wanted:
                raise HeadMismatchError(f"{self.label}: tensor {name!r} has no place in {self.method}")
            if tuple(tensor.shape) != wanted[name]:
                raise HeadMismatchError(
                    f"{self.label}: tensor {name!r} has shape {tuple(tensor.shape)}; {wanted[name]} is expected"
                )
        for name in wanted:
            if name not in self.tensors and name not in (EMBEDDING, OUTPUT) and not name.endswith(".output.weight"):
                raise HeadMismatchError(f"{self.label}: the tensor {name!r} is missing")
            if name not in self.tensors and name in (EMBEDDING, OUTPUT) and wanted[name][1] != self.hidden_size:
                raise HeadMismatchError(
                    f"{self.label}: the tensor {name!r} is missing, and the target's is "
                    f"{self.hidden_size} wide instead of {wanted[name][1]}"
                )
        for layer in self.feature_layers:
            if not 0 <= layer <= self.num_layers:
                raise HeadMismatchError(
                    f"{self.label}: reads the target's hidden state {layer}, but it has {self.num_layers} layers"
                )

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.source or self.method

    @property
    def num_heads(self) -> int:
        """Medusa's heads; 0 for other methods."""
        return len({name.split(".")[1] for name in self.tensors if name.startswith("heads.")})

    def _medusa_shapes(self) -> dict[str, tuple[int, ...]]:
        size = self.hidden_size
        columns = self.vocab_size if self.draft_ids is None else len(self.draft_ids)
        shapes: dict[str, tuple[int, ...]] = {OUTPUT: (columns, size)}
        for k in range(self.num_heads):
            shapes[f"heads.{k}.output.weight"] = (columns, size)
            for i in range(self._num_blocks(k)):
                shapes |= {f"heads.{k}.blocks.{i}.weight": (size, size), f"heads.{k}.blocks.{i}.bias": (size,)}
        return shapes

    def _num_blocks(self, head: int) -> int:
        start = f"heads.{head}.blocks."
        return len({name.split(".")[3] for name in self.tensors if name.startswith(start)})
