"""The contract of a drafter under training, and what all methods share: the target, the draft vocabulary, the goal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from outrider.heads.head import Head
from outrider.models.config import ModelConfig
from outrider.train.batches import Batch
from outrider.train.losses import CrossEntropy, Wanted
from outrider.train.modules.layers import ScaledLinear
from outrider.train.modules.shape import Goal, Shape
from outrider.train.modules.target import Target


@dataclass(frozen=True)
class Tally:
    """What a batch says, by draft position; sums, so that batches can be added up. All [steps] float64.

    entropy, learned: cross-entropy against the target's distribution, and the rows with one. hits, asked: rows whose
    likeliest token is the target's, and those that could be; a token outside the draft vocabulary is asked for and
    never hit. Position k is asked for where the text up to it could be drafted.
    """

    entropy: torch.Tensor
    learned: torch.Tensor
    hits: torch.Tensor
    asked: torch.Tensor

    def __add__(self, other: Tally) -> Tally:
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("entropy", "learned", "hits", "asked"))
        return Tally(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class Outcome:
    """loss: scalar to minimise, a mean over the rows of the first draft position."""

    loss: torch.Tensor
    tally: Tally


class DrafterModule(nn.Module, ABC):
    """A drafter under training. Its parameters are its own tensors; what it takes from the target is none of them.

    dtype: of the products (see `outrider.train.modules.layers`); float32 or bfloat16.
    """

    method: str
    feature_layers: tuple[int, ...]
    normed = False
    config: ModelConfig | None = None
    """See `Head`."""

    def __init__(self, target: Target, draft_ids: torch.Tensor | None, own_output: bool, dtype: torch.dtype) -> None:
        """draft_ids: see `Head.draft_ids`."""
        super().__init__()
        self.target, self.dtype = target, dtype
        self.draft_ids = draft_ids
        rows = target.output if draft_ids is None else target.output[draft_ids]
        self.target_rows = rows
        self.places = torch.full((target.config.vocab_size,), -1)
        ids = torch.arange(target.config.vocab_size) if draft_ids is None else draft_ids
        self.places[ids] = torch.arange(len(ids))
        if own_output:
            self.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
            with torch.no_grad():
                self.lm_head.weight.copy_(rows)

    @classmethod
    @abstractmethod
    def create(cls, target: Target, shape: Shape, draft_ids: torch.Tensor | None, dtype: torch.dtype) -> Self:
        """A new one, in a state from which little data goes far. Random numbers are PyTorch's default ones."""

    @classmethod
    @abstractmethod
    def from_head(cls, head: Head, target: Target, dtype: torch.dtype) -> Self:
        """One that goes on from ``head``. Raises HeadMismatchError if it does not fit, or cannot be trained."""

    @abstractmethod
    def loss(self, batch: Batch, goal: Goal) -> Outcome:
        """Loss and measures of a batch, in the order of its rows."""

    def to_head(self, dtype: torch.dtype = torch.bfloat16) -> Head:
        """What was learned so far, with tensors in ``dtype``, copied."""
        t = self.target.config
        return Head(
            method=self.method,
            hidden_size=t.hidden_size,
            num_layers=t.num_layers,
            vocab_size=t.vocab_size,
            feature_layers=self.feature_layers,
            tensors=self.tensors(dtype),
            normed=self.normed,
            draft_ids=self.draft_ids,
            config=self.config,
        )

    @property
    def last_layer(self) -> int:
        """The target's hidden state that tells its distribution."""
        return self.target.config.num_layers

    def output(self) -> torch.Tensor:
        """The output matrix [D, H] in the dtype of products."""
        return (self.lm_head.weight if hasattr(self, "lm_head") else self.target_rows).to(self.dtype)

    def wanted(self, batch: Batch) -> Wanted:
        """The target's distribution of every label over the draft vocabulary."""
        return Wanted.of_target(self.target.normed(batch.final), self.target_rows.float(), self.dtype)

    def accept_by_rank(self, batches: Iterable[Batch]) -> tuple[tuple[float, ...], ...]:
        """`Head.accept_by_rank` on some batches; empty, and none is read, if the method has no use for it."""
        return ()

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Look at some batches, at least one, before anything is learned from them."""

    def tensors(self, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """What it has learned, by canonical name, in copies."""
        found = {name: tensor.detach().to(dtype, copy=True) for name, tensor in self.named_parameters()}
        for name, layer in self.named_modules():
            if isinstance(layer, ScaledLinear):
                found[f"{name}.weight"] = layer.matrix.detach().to(dtype)
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over the tensors of a head of the same shape, by canonical name."""
        scales = {name: torch.ones_like(tensor) for name, tensor in self.named_buffers()}
        self.load_state_dict(scales | {name: tensor.float() for name, tensor in tensors.items()})


def tally_of(measured: Sequence[CrossEntropy], learned: Sequence[int], asked: Sequence[int]) -> Tally:
    """From what was measured at each draft position, and how many rows were learned from and asked for there."""
    return Tally(
        entropy=torch.stack([part.entropy.double().sum() for part in measured]),
        learned=torch.tensor(learned, dtype=torch.float64),
        hits=torch.stack([part.hit.double().sum() for part in measured]),
        asked=torch.tensor(asked, dtype=torch.float64),
    )
