"""How far to let a drafter run ahead: learned, for each method and tenant, from what drafts cost and what they won."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.core.tenants import TenantStore
from outrider.drafters.calibration import follow
from outrider.drafters.cost import Recent

if TYPE_CHECKING:
    from outrider.core.tree import DraftTree
    from outrider.drafters.base import Budget, Drafter

_FORGET = 0.1
_PROBE_EVERY = 16
_CHEAP = 0.02
_PROFIT_MEMORY = 0.95
_ENOUGH_ROUNDS = 8.0
_MARGIN = 1.1
"""How much faster than without it a drafter that costs real time must promise to be: estimates are off by as much."""


class DraftPrice(Recent):
    """Seconds that drafting takes per level of depth."""

    def observe(self, trees: Sequence[DraftTree], seconds: float) -> None:
        """Learn what drafting these trees together took."""
        depth = max((max(tree.depths(), default=0) for tree in trees), default=0)
        if depth > 0:
            self.add(seconds / depth)


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


class Pace:
    """One method's, for one tenant: what others' texts are like must not be seen in a tenant's speed."""

    def __init__(
        self, draft: DraftPrice | None = None, accept_by_depth: Sequence[float] = (), *, limits_depth: bool = True
    ) -> None:
        """draft: what drafting takes, which others may observe too. accept_by_depth: chance that a node of each depth
        is accepted where its parent was, before anything has been observed; beyond the last one it stays the same.
        limits_depth: False for a drafter that is asked in full or not at all.
        """
        self.draft = draft if draft is not None else DraftPrice()
        self._accept_by_depth = list(accept_by_depth)
        self._limits_depth = limits_depth
        self._rows_per_level = 1.0
        self._accounts: dict[int, _Account] = {}
        self._rounds = 0
        self.in_earnest = True
        """Whether the last `budget` was for a draft that promises to pay, as far as is known, and not for a trial."""

    def budget(self, full: Budget, drafting: int, beside: Sequence[float] = ()) -> Budget:
        """Limits for the coming round, for so many of its requests. ``full``: what is allowed at most, and the price.

        A drafter that costs real time is asked for no more depth than pays, and none is asked whose drafts, all in all,
        cost more than they win. Both are tried again now and then: what is never asked for is never seen to improve.

        beside: chances that drafts which are there already reach depth 1, 2, … . What the drafter adds to those counts.
        """
        if full.price is None:
            return full
        self._rounds += 1
        probe = self._rounds % _PROBE_EVERY == 0
        account = self._accounts.get(_size_class(full.requests))
        self.in_earnest = account is None or not account.in_debt
        if not self.in_earnest and not probe:
            return replace(full, nodes=0, depth=0)
        known = self._limits_depth and self.draft.known and self._accept_by_depth
        if not known or self.draft.median < _CHEAP * full.price(0):
            return full
        best = self._best_depth(full, full.price, drafting, beside)
        self.in_earnest = self.in_earnest and best > 0
        if best < full.depth and probe:
            best += 1
        return replace(full, nodes=full.nodes if best else 0, depth=best)

    def _best_depth(self, full: Budget, price: Callable[[float], float], drafting: int, beside: Sequence[float]) -> int:
        """The depth, within ``full``, that promises the most tokens per second; 0: not to be asked."""

        def rate(chances: Sequence[float], seconds: float) -> float:
            rows = drafting * len(chances) * (self._rows_per_level if seconds else 1.0)
            return (full.requests + drafting * sum(chances)) / (price(rows) + seconds)

        without = max(range(len(beside) + 1), key=lambda levels: rate(beside[:levels], 0.0))
        best, best_rate = 0, _MARGIN * rate(beside[:without], 0.0)
        chances, reach = list(beside[:without]), 1.0
        for depth in range(1, full.depth + 1):
            reach *= self._accept_by_depth[min(depth, len(self._accept_by_depth)) - 1]
            if depth <= len(chances):
                chances[depth - 1] = max(chances[depth - 1], reach)
            else:
                chances.append(reach)
            depth_rate = rate(chances, depth * self.draft.median)
            if depth_rate > best_rate:
                best, best_rate = depth, depth_rate
        return best

    def observe_profit(self, requests: int, seconds: float) -> None:
        """Learn what asking for a draft won for one of so many requests, in seconds; negative: lost."""
        self._accounts.setdefault(_size_class(requests), _Account()).add(seconds)

    def observe_paying(self, paying: DraftTree, committed: Sequence[int]) -> None:
        """As `observe_committed`, of the part of a tree that is worth its rows, which may be nothing."""
        levels = max(paying.depths(), default=1)
        self._rows_per_level += _FORGET * (max(len(paying) / levels, 1.0) - self._rows_per_level)
        self._observe(paying, levels, committed)

    def observe_committed(self, proposed: DraftTree, committed: Sequence[int]) -> None:
        """Learn how deep one proposed tree was right, verified or not."""
        if proposed.tokens:
            self._observe(proposed, max(proposed.depths()), committed)

    def _observe(self, tree: DraftTree, levels: int, committed: Sequence[int]) -> None:
        reached = len(follow(tree, committed))
        for depth in range(1, min(levels, reached + 1, len(committed)) + 1):
            if len(self._accept_by_depth) < depth:
                self._accept_by_depth.append(self._accept_by_depth[-1] if self._accept_by_depth else 0.7)
            hit = float(depth <= reached)
            self._accept_by_depth[depth - 1] += _FORGET * (hit - self._accept_by_depth[depth - 1])


def paces_of(drafter: Drafter) -> TenantStore[Pace]:
    """A pace for each tenant. What a model of its own costs a drafter depends on nobody's text, and is known to all."""
    shared = DraftPrice() if drafter.needs_model else None
    return TenantStore(lambda: Pace(shared, drafter.accept_by_depth, limits_depth=not drafter.minds_price))


def _size_class(requests: int) -> int:
    """Batches of 1, 2-3, 4-7, 8-15, … requests: what pays for one of them may not pay for another."""
    return requests.bit_length()
