"""The target's hidden states over texts, through an executor, many short texts in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from outrider.core.errors import ConfigError
from outrider.executors.base import Executor, Segment

ROWS = 2048
"""Rows of a forward pass, where memory has room for them: more do not make it faster."""


class StateSource:
    """Computes hidden states of ``layers``, numbered as in `ForwardOutput.hidden`; holds no sequence between calls."""

    def __init__(self, executor: Executor, layers: Sequence[int]) -> None:
        """Raises ConfigError for a layer that the model does not have."""
        deepest = executor.config.num_layers
        if not layers or not all(0 <= layer <= deepest for layer in layers):
            raise ConfigError(f"hidden states of layers {list(layers)} were asked for; there are 0 to {deepest}")
        self.layers = tuple(layers)
        self.hidden_size = executor.config.hidden_size
        self._executor = executor

    def compute(self, texts: Iterable[Sequence[int]]) -> Iterator[torch.Tensor]:
        """For each text [T] its states, bfloat16 [len(layers), T, H], in order.

        Raises ContextLengthError for a text that is longer than the executor's context.
        """
        group: list[Sequence[int]] = []
        rows = 0
        for text in texts:
            need = self._pages(text)
            if group and rows + need > min(ROWS, self._executor.free_tokens):
                yield from self._forward(group)
                group, rows = [], 0
            group.append(text)
            rows += need
        if group:
            yield from self._forward(group)

    def _pages(self, text: Sequence[int]) -> int:
        page = self._executor.page_size
        return -(-len(text) // page) * page

    def _forward(self, group: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
        seqs = [self._executor.open() for _ in group]
        try:
            segments = [Segment.chain(seq, text, logits=()) for seq, text in zip(seqs, group, strict=True)]
            hidden = self._executor.forward(segments, self.layers).hidden
        finally:
            for seq in seqs:
                self._executor.close(seq)
        joined = torch.stack([hidden[layer].to("cpu", torch.bfloat16) for layer in self.layers])
        yield from torch.split(joined, [len(text) for text in group], dim=1)
