"""Medusa (Cai et al., 2024): heads on the last hidden state, each of which guesses one token further ahead."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from outrider.core.errors import HeadMismatchError
from outrider.heads.head import Head
from outrider.models.config import OUTPUT
from outrider.train.batches import Batch
from outrider.train.losses import soft_cross_entropy
from outrider.train.modules.base import DrafterModule, Outcome, tally_of
from outrider.train.modules.layers import Product, ScaledLinear
from outrider.train.modules.shape import Goal, Shape
from outrider.train.modules.target import Target


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
        known = batch.learned & (self.places[batch.labels] >= 0)
        features = self.target.normed(batch.features)
        wanted = self.wanted(batch)
        shared = self.output()
        total = torch.zeros(())
        parts, sizes, asked = [], [], []
        for number, head in enumerate(self.heads):
            assert isinstance(head, MedusaHead)
            inside = (batch.left >= number).nonzero().squeeze(1)
            bases = inside[known[inside + number]]
            asked.append(int(batch.learned[inside + number].sum()))
            output = Product.of(self.dtype, head.output).weight if hasattr(head, "output") else shared
            x = head(features[bases], self.dtype).to(self.dtype)
            scale = torch.full((len(bases),), goal.decay**number / max(int(known.sum()), 1))
            measured = soft_cross_entropy(x, output, wanted, bases + number, scale)
            total = total + measured.total
            parts.append(measured)
            sizes.append(len(bases))
        return Outcome(total, tally_of(parts, sizes, asked))
