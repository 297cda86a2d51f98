"""What drafting costs: before anything has been measured, and as it was of late."""

from __future__ import annotations

import statistics
from collections import deque

from outrider.models.config import EMBEDDING, ModelConfig, weight_shapes

_SAMPLES = 9


class Recent:
    """Seconds that something took: the median of the last times.

    A median, because a round in which the drafter first had to read a prompt says nothing about the next one.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.median = 0.0

    @property
    def known(self) -> bool:
        return len(self._samples) > _SAMPLES // 2

    def add(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.median = statistics.median(self._samples)


def another_level_pays(gain: float, expected: float, levels: int, ratio: float) -> bool:
    """Whether one more level of a draft tree raises the expected tokens per unit of cost.

    gain: tokens that it is expected to bring. expected: tokens of the round without it, after ``levels`` levels.
    ratio: a level's cost in units of what else a round costs: tokens per cost stand at expected / (1 + levels * ratio).
    """
    return gain * (1 + levels * ratio) >= expected * ratio


def parameters(config: ModelConfig) -> int:
    """Weights that a forward pass reads: what it costs while memory is the limit. An embedding is only looked up."""
    total = 0
    for name, shape in weight_shapes(config).items():
        if name != EMBEDDING or config.tie_embeddings:
            size = 1
            for n in shape:
                size *= n
            total += size
    return total
