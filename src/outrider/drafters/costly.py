"""A cascade's member that runs a model: asked where it adds more to what the others propose than it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.core.tree import DraftTree
from outrider.drafters.calibration import follow, path_products
from outrider.drafters.pace import paces_of
from outrider.drafters.tenants import TenantStore

if TYPE_CHECKING:
    from outrider.drafters.base import Budget, Drafter, Observation, SequenceView

Ask = Callable[[Sequence["SequenceView"], "Budget"], Sequence[DraftTree] | None]
"""Trees for the views, or None if the drafter failed."""

_FIRST_TRIAL = 6
_TRIAL = 24
_REST = 96
_LONGEST_REST = 768


@dataclass
class _Duty:
    """Whether the drafter follows what a tenant's requests do, which costs time in every round, drafts or not.

    left: rounds until that is decided anew. rest: rounds of the next rest. needed: it was asked in earnest since then.
    """

    awake: bool = True
    left: int = _FIRST_TRIAL
    rest: int = _REST
    needed: bool = False

    def count(self, needed: bool) -> None:
        """One more round of one request."""
        self.left -= 1
        self.needed |= needed
        if self.left:
            return
        if self.awake and not self.needed:
            self.awake, self.left, self.rest = False, self.rest, min(2 * self.rest, _LONGEST_REST)
            return
        if self.needed:
            self.rest = _REST
        self.awake, self.left, self.needed = True, _TRIAL, False


@dataclass(frozen=True)
class _Asked:
    """tree: what was proposed for one request. seconds: its part of the time that took. requests: of that round."""

    tree: DraftTree
    seconds: float
    requests: int
    price: Callable[[int], float]
    in_earnest: bool


class CostlyMember:
    """Keeps the books of one drafter: by tenant, what it wins beyond the nodes that are there without it.

    One that is not worth asking is not told of the rounds either, for longer and longer stretches.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._paces = paces_of(drafter)
        self._duties: TenantStore[_Duty] = TenantStore(_Duty)
        self._asked: dict[int, _Asked] = {}
        self._minds_price = False

    def propose(
        self, views: Sequence[SequenceView], budget: Budget, beside: Sequence[DraftTree], ask: Ask
    ) -> Sequence[DraftTree] | None:
        """A tree for each view, empty for those that the drafter is not asked about; None if it failed.

        beside: what the others propose for each view, its scores being chances.
        """
        self._minds_price = budget.price is not None
        if budget.price is None:
            return ask(views, budget)
        depths = [
            self._paces.get(view.tenant).budget(budget, len(views), reach_by_depth(tree)).depth
            if self.is_awake(view)
            else 0
            for view, tree in zip(views, beside, strict=True)
        ]
        chosen = [view for view, depth in zip(views, depths, strict=True) if depth]
        if not chosen:
            return [DraftTree()] * len(views)
        started = time.perf_counter()
        # One depth for all of them: the model's passes are shared, and go as deep as the deepest tree.
        trees = ask(chosen, replace(budget, depth=max(depths)))
        if trees is None:
            return None
        seconds = time.perf_counter() - started
        for tenant in dict.fromkeys(view.tenant for view in chosen):
            self._paces.get(tenant).draft.observe(trees, seconds)
        found = {view.request_id: tree for view, tree in zip(chosen, trees, strict=True)}
        for view in chosen:
            in_earnest = self._paces.get(view.tenant).in_earnest
            self._asked[view.request_id] = _Asked(
                found[view.request_id], seconds / len(chosen), len(views), budget.price, in_earnest
            )
        return [found.get(view.request_id, DraftTree()) for view in views]

    def is_awake(self, view: SequenceView) -> bool:
        """Whether the drafter follows the request."""
        return not self._minds_price or self._duties.get(view.tenant).awake

    def learn(self, observation: Observation) -> None:
        """Learn what the drafter was worth in the round that this tells of."""
        if not self._minds_price:
            return
        view = observation.view
        asked = self._asked.pop(view.request_id, None)
        duty = self._duties.get(view.tenant)
        duty.count(asked is not None and asked.in_earnest)
        if not duty.awake:
            self.drafter.pause(view)
        if asked is not None:
            pace = self._paces.get(view.tenant)
            pace.observe_committed(asked.tree, observation.committed)
            pace.observe_profit(asked.requests, self._profit(asked, observation.tree, observation.committed))

    def forget(self, request_id: int) -> None:
        self._asked.pop(request_id, None)

    def _profit(self, asked: _Asked, verified: DraftTree, committed: Sequence[int]) -> float:
        """Seconds won: the plain rounds that its nodes made needless, less what their rows and drafting took."""
        others = verified.keep({n for n, who in enumerate(verified.sources) if who != (self.drafter.name,)})
        won = len(follow(verified, committed)) - len(follow(others, committed))
        requests, price = asked.requests, asked.price
        rows = price(requests * len(verified)) - price(requests * len(others))
        return (won * price(0) - rows) / requests - asked.seconds


def reach_by_depth(tree: DraftTree) -> list[float]:
    """The chance that the accepted path reaches depth 1, 2, …, for a tree whose scores are chances."""
    reach: list[float] = []
    for depth, chance in zip(tree.depths(), path_products(tree.parents, tree.scores), strict=True):
        reach.extend([0.0] * (depth - len(reach)))
        reach[depth - 1] = min(reach[depth - 1] + chance, 1.0)
    return reach
