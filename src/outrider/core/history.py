"""What a request's penalties look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.core.transform import Row


class History:
    """Every token seen in prompt or output, and how often the output holds it.

    length: tokens of the output. It is counted by whoever owns the history, who may leave out `append` where no penalty
    asks for it.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self.counts: Row = np.zeros(len(self.ids), dtype=np.float32)
        self.length = 0
        self._slot = {int(token): slot for slot, token in enumerate(self.ids)}
        self._by_token: Row = np.empty(0, dtype=np.float32)

    def append(self, token: int) -> None:
        slot = self._slot.setdefault(token, len(self.ids))
        if slot == len(self.ids):
            self.ids = np.append(self.ids, token)
            self.counts = np.append(self.counts, np.float32(0))
        self.counts[slot] += 1
        if token < len(self._by_token):
            self._by_token[token] = self.counts[slot]

    def seen_on(self, path: Sequence[int]) -> tuple[npt.NDArray[np.int64], Row]:
        """Distinct tokens of ``path``, and how often each occurs in output and path together."""
        numbers = {token: self._count(token) + n for token, n in Counter(path).items()}
        return np.array(list(numbers), dtype=np.int64), np.array(list(numbers.values()), dtype=np.float32)

    def counts_of(self, ids: npt.NDArray[np.int64], vocab_size: int) -> Row:
        """How often the output holds each of ``ids`` (any shape); -1 for a token that the prompt does not hold either.

        The first call lays out a table of the whole vocabulary, so that many can be looked up at once.
        """
        if len(self._by_token) < vocab_size:
            self._by_token = np.full(vocab_size, -1, dtype=np.float32)
            inside = self.ids < vocab_size
            self._by_token[self.ids[inside]] = self.counts[inside]
        return self._by_token[ids]

    def _count(self, token: int) -> int:
        slot = self._slot.get(token)
        return 0 if slot is None else int(self.counts[slot])
