"""What a drafter learns from: texts with the target's hidden states, on disk as far as they may be, else made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.core.errors import UsageError
from outrider.executors.base import Executor
from outrider.train.data import Sample
from outrider.train.shards import Shards
from outrider.train.states import ROWS, StateSource


@dataclass(frozen=True)
class Features:
    """One text with what the target thought at each of its T positions.

    tokens: int64 [T]. hidden: layer -> bfloat16 [T, H], the residual stream after that many blocks, no norm applied;
    not to be written to. mask: bool [T]; whether the token at that position is one that a drafter learns to guess.
    """

    tokens: torch.Tensor
    hidden: Mapping[int, torch.Tensor]
    mask: torch.Tensor


class FeatureStore:
    """`Features` of every sample, by its number.

    States of the first samples are written to ``folder`` by `fill`, up to ``disk_budget`` bytes; those of the others
    are computed when they are read, each time. Both ways give the same numbers. What an earlier run wrote for the same
    samples (or for a beginning of them), layers and target is used again, however that run ended.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        layers: Sequence[int],
        executor: Executor,
        folder: Path,
        *,
        disk_budget: int,
        target: str,
    ) -> None:
        """layers: numbered as in `ForwardOutput.hidden`. executor: the target's; in use only during `fill` and `read`.
        target: what the target is, as `outrider.train.identity.Origin` says.

        Raises ConfigError for a layer that is not there, UsageError for a sample that is too long for the executor.
        """
        longest = max((len(sample.tokens) for sample in samples), default=0)
        if longest > min(executor.max_context, executor.total_tokens):
            raise UsageError(f"a sample of {longest} tokens is longer than the context of {executor.max_context}")
        self.samples = samples
        self.layers = tuple(layers)
        self.hidden_size = executor.config.hidden_size
        self._source = StateSource(executor, layers)
        self._budget = disk_budget
        self._shards = Shards(
            folder,
            [sample.tokens for sample in samples],
            len(self.layers) * self.hidden_size,
            f"{target} {self.layers}",
        )

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def cached(self) -> int:
        """How many samples, from the first, have their states on disk."""
        return self._shards.done

    @property
    def cacheable(self) -> int:
        """How many samples, from the first, the budget has room for."""
        left = self._budget
        for index in range(len(self)):
            left -= self._shards.bytes_of(index)
            if left < 0:
                return index
        return len(self)

    def fill(self, progress: Callable[[int], object] | None = None) -> None:
        """Compute and write what the budget has room for. progress: called with the tokens that each step has done.

        Raises DiskFullError if the disk is nearly full; what was written is whole, and the next `fill` goes on there.
        """
        for group in _groups(self.samples, range(self.cached, self.cacheable)):
            states = list(self._source.compute([self.samples[index].tokens for index in group]))
            self._shards.append(states)
            if progress is not None:
                progress(sum(len(self.samples[index].tokens) for index in group))

    def read(self, index: int) -> Features:
        """The features of one sample."""
        return next(self.read_many([index]))

    def read_many(self, indices: Iterable[int]) -> Iterator[Features]:
        """The features of several samples, in order; what is not on disk is computed in common forward passes."""
        for group in _groups(self.samples, indices):
            missing = [index for index in group if index >= self.cached]
            states = self._source.compute([self.samples[index].tokens for index in missing])
            for index in group:
                flat = self._shards.read(index) if index < self.cached else next(states)
                yield self._features(self.samples[index], flat)

    def close(self) -> None:
        """Let go of the files."""
        self._shards.close()

    def _features(self, sample: Sample, states: torch.Tensor) -> Features:
        length = len(sample.tokens)
        mask = torch.zeros(length, dtype=torch.bool)
        for start, end in sample.loss_from:
            mask[start:end] = True
        hidden = states.view(len(self.layers), length, self.hidden_size)
        return Features(
            torch.tensor(sample.tokens, dtype=torch.int64), dict(zip(self.layers, hidden, strict=True)), mask
        )


def _groups(samples: Sequence[Sample], indices: Iterable[int]) -> Iterator[list[int]]:
    """Consecutive indices, together of about as many tokens as a forward pass takes."""
    group: list[int] = []
    rows = 0
    for index in indices:
        size = len(samples[index].tokens)
        if group and rows + size > ROWS:
            yield group
            group, rows = [], 0
        group.append(index)
        rows += size
    if group:
        yield group
