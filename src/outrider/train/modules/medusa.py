"""Medusa (Cai et al., 2024): heads on the last hidden state, each of which guesses one token further ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from outrider.core.errors import HeadMismatchError
from outrider.heads.head import Head
from outrider.models.config import OUTPUT
from outrider.train.batches import Batch
from outrider.train.losses import Wanted, soft_cross_entropy
from outrider.train.modules.base import DrafterModule, Outcome, tally_of
from outrider.train.modules.layers import Product, ScaledLinear
from outrider.train.modules.shape import Goal, Shape
from outrider.train.modules.target import Target

_RANKS = 8
"""Guesses of a head that are told apart: as many as its drafter looks at."""
_CHUNK = 256
"""Rows whose logits are held at once."""


class MedusaHead(nn.Module):
    """One head: residual blocks x + silu(W x + b), which do nothing at first, and perhaps an output matrix."""

    def __init__(self, size: int, num_blocks: int, rows: torch.Tensor | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ScaledLinear(size, size, bias=True) for _ in range(num_blocks)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if rows is not None:
            self.output = nn.Linear(size, len(rows), bias=False)
            with torch.no_grad():
                self.output.weight.copy_(rows)

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x: [R, H] float32 -> the same, past the blocks."""
        for block in self.blocks:
            assert isinstance(block, ScaledLinear)
            x = x + F.silu(Product.of(dtype, block)(x))
        return x


@dataclass(frozen=True)
class _Guess:
    """One head's, for R places. x: [R, H], what goes into ``output`` [D, H]. rows: [R], whose labels are guessed.

    asked: how many places there are, with those whose tokens cannot be drafted.
    """

    x: torch.Tensor
    output: torch.Tensor
    rows: torch.Tensor
    asked: int

    def ranks(self, wanted: Wanted) -> torch.Tensor:
        """[R] int64: the place of the target's likeliest token among the columns, the best being 0; at most _RANKS."""
        ranks = [torch.zeros(0, dtype=torch.int64)]
        for start in range(0, len(self.x), _CHUNK):
            part = slice(start, start + _CHUNK)
            logits = self.x[part] @ self.output.T
            right = wanted.likeliest[self.rows[part], None]
            own = logits.gather(1, right)
            before = (logits > own) | ((logits == own) & (torch.arange(logits.shape[1]) < right))
            ranks.append(before.sum(1).clamp(max=_RANKS))
        return torch.cat(ranks)


class Medusa(DrafterModule):
    method = "medusa"
    normed = True

    def __init__(
        self,
        target: Target,
        num_heads: int,
        num_blocks: int,
        draft_ids: torch.Tensor | None,
        own_outputs: bool,
        shared_output: bool,
        dtype: torch.dtype,
    ) -> None:
        """own_outputs: every head has an output matrix. shared_output: they have one in common, not the target's."""
        super().__init__(target, draft_ids, shared_output, dtype)
        self.feature_layers = (target.config.num_layers,)
        rows = self.target_rows if own_outputs else None
        size = target.config.hidden_size
        self.heads = nn.ModuleList([MedusaHead(size, num_blocks, rows) for _ in range(num_heads)])

    @classmethod
    def create(cls, target: Target, shape: Shape, draft_ids: torch.Tensor | None, dtype: torch.dtype) -> Medusa:
        return cls(target, shape.num_heads, shape.num_blocks, draft_ids, bool(shape.own_output), False, dtype)

    @classmethod
    def from_head(cls, head: Head, target: Target, dtype: torch.dtype) -> Medusa:
        head.check_fits(target.config, target.name)
        head.check_tensors()
        blocks = {
            sum(name.startswith(f"heads.{k}.blocks.") for name in head.tensors) // 2 for k in range(head.num_heads)
        }
        outputs = sum(name.endswith(".output.weight") for name in head.tensors)
        if head.method != cls.method or len(blocks) != 1 or outputs not in (0, head.num_heads):
            raise HeadMismatchError(f"{head.source or 'this'}: not heads of one kind, as training takes them")
        shared = OUTPUT in head.tensors
        module = cls(target, head.num_heads, blocks.pop(), head.draft_ids, outputs > 0, shared, dtype)
        module.load(head.tensors)
        return module

    def prepare(self, batches: Iterable[Batch]) -> None:
        features = self.target.normed(next(iter(batches)).features)
        size = float(features.pow(2).mean().sqrt())  # what is added to the features is to be as large
        for layer in self.modules():
            if isinstance(layer, ScaledLinear):
                layer.measure(features, size)

    def loss(self, batch: Batch, goal: Goal) -> Outcome:
        """Head k is trained on the target's distribution k places after the label."""
        wanted = self.wanted(batch)
        known = int(self._known(batch).sum())
        total = torch.zeros(())
        parts, sizes, asked = [], [], []
        for number, guess in enumerate(self._guesses(batch)):
            scale = torch.full((len(guess.rows),), goal.decay**number / max(known, 1))
            measured = soft_cross_entropy(guess.x, guess.output, wanted, guess.rows, scale)
            total = total + measured.total
            parts.append(measured)
            sizes.append(len(guess.rows))
            asked.append(guess.asked)
        return Outcome(total, tally_of(parts, sizes, asked))

    def accept_by_rank(self, batches: Iterable[Batch]) -> tuple[tuple[float, ...], ...]:
        hits = torch.zeros(len(self.heads), _RANKS + 1, dtype=torch.int64)
        asked = torch.zeros(len(self.heads), 1, dtype=torch.int64)
        for batch in batches:
            wanted = self.wanted(batch)
            for number, guess in enumerate(self._guesses(batch)):
                hits[number] += torch.bincount(guess.ranks(wanted), minlength=_RANKS + 1)
                asked[number] += guess.asked
        shares = (hits[:, :_RANKS] / asked.clamp(min=1)).tolist()
        return tuple(tuple(round(share, 6) for share in of_ranks) for of_ranks in shares)

    def _known(self, batch: Batch) -> torch.Tensor:
        """[N] bool, rows whose label is to be learned and can be drafted."""
        return batch.learned & (self.places[batch.labels] >= 0)

    def _guesses(self, batch: Batch) -> Iterator[_Guess]:
        """What each head says, one after the other."""
        known = self._known(batch)
        features = self.target.normed(batch.features)
        shared = self.output()
        for number, head in enumerate(self.heads):
            assert isinstance(head, MedusaHead)
            inside = (batch.left >= number).nonzero().squeeze(1)
            bases = inside[known[inside + number]]
            output = Product.of(self.dtype, head.output).weight if hasattr(head, "output") else shared
            x = head(features[bases], self.dtype).to(self.dtype)
            yield _Guess(x, output, bases + number, int(batch.learned[inside + number].sum()))
