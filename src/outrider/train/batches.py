"""Samples side by side: the rows of a batch as flat tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.train.modules.attention import Grid

AHEAD = 2
"""A row takes in the token after its feature's, and its logits are for the one after that."""


class Features(Protocol):
    """One sample with the target's hidden states.

    tokens: [T] int64. hidden: layer -> [T, H], numbered as in `ForwardOutput.hidden`. mask: [T] bool, positions whose
    tokens a drafter learns to guess.
    """

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def hidden(self) -> Mapping[int, torch.Tensor]: ...

    @property
    def mask(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Batch:
    """N rows of several samples, one sample after another. Row i of a sample stands at its position i.

    tokens: [N] int64, the token at position i + 1, which the row takes in. labels: [N] int64, the one at i + 2, which
    its logits are for. learned: [N] bool, whether that one is to be learned. positions: [N] int64. left: [N] int64,
    rows that follow in the sample. features: [N, layers * H], the target's states at i, joined. final: [N, H], its
    state after the last block at i + 1, before the final norm, which tells its distribution of the label.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    learned: torch.Tensor
    positions: torch.Tensor
    left: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor
    grid: Grid

    def __len__(self) -> int:
        return len(self.tokens)


def collate(samples: Sequence[Features], feature_layers: Sequence[int], last_layer: int) -> Batch:
    """Rows of the samples, each of which has at least AHEAD + 1 tokens."""
    counts = [len(sample.tokens) - AHEAD for sample in samples]
    longest = max(counts)
    places = [torch.arange(count) for count in counts]
    slots = torch.cat([place + number * longest for number, place in enumerate(places)])
    joined = [torch.cat([sample.hidden[layer][:-AHEAD] for layer in feature_layers], -1) for sample in samples]
    return Batch(
        tokens=torch.cat([sample.tokens[1:-1] for sample in samples]),
        labels=torch.cat([sample.tokens[AHEAD:] for sample in samples]),
        learned=torch.cat([sample.mask[AHEAD:] for sample in samples]),
        positions=torch.cat(places),
        left=torch.cat([place.flip(0) for place in places]),
        features=torch.cat(joined),
        final=torch.cat([sample.hidden[last_layer][1:-1] for sample in samples]),
        grid=Grid(len(samples), longest, slots),
    )
