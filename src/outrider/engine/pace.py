"""How far to let a drafter run ahead: learned, for each method and tenant, from what drafts cost and what they won."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.drafters.base import Budget
from outrider.drafters.calibration import follow

if TYPE_CHECKING:
    from outrider.core.tree import DraftTree
    from outrider.engine.price import ForwardPrice

_FORGET = 0.1
_PROBE_EVERY = 16
_SAMPLES = 9
_CHEAP = 0.02
_PROFIT_MEMORY = 0.95
_ENOUGH_ROUNDS = 8.0


class DraftPrice:
    """Seconds that drafting takes per level of depth: the median of the last rounds.

    A median, because a round in which the drafter first had to read a prompt says nothing about the next one.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self.per_level = 0.0

    @property
    def known(self) -> bool:
        return len(self._samples) > _SAMPLES // 2

    def observe(self, trees: Sequence[DraftTree], seconds: float) -> None:
        """Learn what drafting these trees together took."""
        depth = max((max(tree.depths(), default=0) for tree in trees), default=0)
        if depth > 0:
            self._samples.append(seconds / depth)
            self.per_level = statistics.median(self._samples)


@dataclass
class _Account:
    """Fading sums over the rounds in which drafts were asked for. profit: seconds won, or lost if negative."""

    profit: float = 0.0
    rounds: float = 0.0

    @property
    def in_debt(self) -> bool:
        return self.rounds >= _ENOUGH_ROUNDS and self.profit < 0

    def add(self, profit: float) -> None:
        self.profit = self.profit * _PROFIT_MEMORY + profit
        self.rounds = self.rounds * _PROFIT_MEMORY + 1.0


@dataclass
class Pace:
    """One method's, for one tenant: what others' texts are like must not be seen in a tenant's speed."""

    draft: DraftPrice = field(default_factory=DraftPrice)
    _accept_by_depth: list[float] = field(default_factory=list)
    _accounts: dict[int, _Account] = field(default_factory=dict)
    _rounds: int = 0

    def budget(self, full: Budget, batch_size: int, price: ForwardPrice) -> Budget:
        """Limits for the coming round, of a batch of that size. ``full``: what the configuration allows.

        A drafter that costs real time is asked for no more depth than pays, and none is asked whose drafts, all in all,
        cost more than they win. Both are tried again now and then: what is never asked for is never seen to improve.
        """
        self._rounds += 1
        probe = self._rounds % _PROBE_EVERY == 0
        account = self._accounts.get(_size_class(batch_size))
        if account is not None and account.in_debt and not probe:
            return Budget(0, 0)
        plain = price.at(batch_size)
        if not self.draft.known or not self._accept_by_depth or self.draft.per_level < _CHEAP * plain:
            return full
        best, best_rate, expected, reach = 0, batch_size / plain, 1.0, 1.0
        for depth in range(1, full.depth + 1):
            known = self._accept_by_depth
            reach *= known[min(depth, len(known)) - 1]
            expected += reach
            seconds = price.at(batch_size * (1 + depth)) + depth * self.draft.per_level
            if batch_size * expected / seconds > best_rate:
                best, best_rate = depth, batch_size * expected / seconds
        if best < full.depth and probe:
            best += 1
        return Budget(full.nodes if best else 0, best)

    def observe_profit(self, batch_size: int, seconds: float) -> None:
        """Learn what asking for a draft won for one request of a batch of that size, in seconds; negative: lost."""
        self._accounts.setdefault(_size_class(batch_size), _Account()).add(seconds)

    def observe_committed(self, proposed: DraftTree, committed: Sequence[int]) -> None:
        """Learn how deep one proposed tree was right, verified or not."""
        if not proposed.tokens:
            return
        reached = len(follow(proposed, committed))
        for depth in range(1, min(max(proposed.depths()), reached + 1, len(committed)) + 1):
            if len(self._accept_by_depth) < depth:
                self._accept_by_depth.append(self._accept_by_depth[-1] if self._accept_by_depth else 0.7)
            hit = float(depth <= reached)
            self._accept_by_depth[depth - 1] += _FORGET * (hit - self._accept_by_depth[depth - 1])


def _size_class(batch_size: int) -> int:
    """Batches of 1, 2-3, 4-7, 8-15, … requests: what pays for one of them may not pay for another."""
    return batch_size.bit_length()
