"""A cascade's member that runs a model: asked where it adds more to what the others propose than it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from outrider.core.tenants import TenantStore
from outrider.core.tree import DraftTree
from outrider.drafters.calibration import follow, path_products
from outrider.drafters.duty import Duty, watch_for_vain_drafts
from outrider.drafters.pace import paces_of

if TYPE_CHECKING:
    from outrider.drafters.base import Budget, Drafter, Observation, SequenceView

Ask = Callable[[Sequence["SequenceView"], "Budget"], Sequence[DraftTree] | None]
"""Trees for the views, or None if the drafter failed."""


@dataclass(frozen=True)
class _Asked:
    """tree: what was proposed for one request. seconds: its part of the time that took. budget: of that round."""

    tree: DraftTree
    seconds: float
    budget: Budget
    in_earnest: bool


class CostlyMember:
    """Keeps the books of one drafter: by tenant, what it wins beyond the nodes that are there without it.

    One that wants hidden states and is not worth asking is not told of the rounds either, for longer and longer
    stretches.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._paces = paces_of(drafter)
        self._duties: TenantStore[Duty] = TenantStore(Duty)
        self._rests = bool(drafter.wants.hidden_layers)
        self._asked: dict[int, _Asked] = {}
        self._minds_price = False
        self._watch = watch_for_vain_drafts()

    def propose(
        self,
        views: Sequence[SequenceView],
        budget: Budget,
        beside: Callable[[SequenceView], DraftTree],
        ask: Ask,
    ) -> Sequence[DraftTree] | None:
        """A tree for each view, empty for those that the drafter is not asked about; None if it failed.

        beside: what is proposed for a view without any drafter that runs a model, its scores being chances. Were it to
        depend on what a model drew, a rule that compares p with q would be biased by who is asked.
        """
        self._minds_price = budget.price is not None
        if budget.price is None:
            return ask(views, budget)
        depths = self._depths([view for view in views if self.is_awake(view)], budget, beside)
        chosen = [view for view in views if depths.get(view.tenant)]
        if not chosen:
            return [DraftTree()] * len(views)
        started = time.perf_counter()
        # One depth for all of them: the model's passes are shared, and go as deep as the deepest tree.
        trees = ask(chosen, replace(budget, depth=max(depths.values())))
        if trees is None:
            return None
        seconds = time.perf_counter() - started
        for draft in {self._paces.get(view.tenant).draft for view in chosen}:
            draft.observe(trees, seconds)
        for view, tree in zip(chosen, trees, strict=True):
            in_earnest = self._paces.get(view.tenant).in_earnest
            self._asked[view.request_id] = _Asked(tree, seconds / len(chosen), budget, in_earnest)
        found = dict(zip((view.request_id for view in chosen), trees, strict=True))
        return [found.get(view.request_id, DraftTree()) for view in views]

    def is_awake(self, view: SequenceView) -> bool:
        """Whether the drafter follows the request."""
        return not self._minds_price or self._duties.get(view.tenant).awake

    def learn(self, observations: Sequence[Observation]) -> list[SequenceView]:
        """Learn what the drafter was worth in a round. Returns the requests that it follows no longer."""
        if not self._minds_price:
            return []
        own = [sum(who == (self.drafter.name,) for who in o.tree.sources) for o in observations]
        all_nodes = sum(len(observation.tree) for observation in observations)
        earnest: dict[str, bool] = {}
        for observation, nodes in zip(observations, own, strict=True):
            view = observation.view
            asked = self._asked.pop(view.request_id, None)
            if observation.rows:  # no chunk of a prompt: there was something to draft for
                earnest[view.tenant] = earnest.get(view.tenant, False) or (asked is not None and asked.in_earnest)
            if asked is not None:
                self._book(asked, observation, nodes / max(sum(own), 1), all_nodes - sum(own), all_nodes)
        gone = self._count(earnest)
        return [observation.view for observation in observations if observation.view.tenant in gone]

    def forget(self, request_id: int) -> None:
        self._asked.pop(request_id, None)

    def _depths(
        self, views: Sequence[SequenceView], budget: Budget, beside: Callable[[SequenceView], DraftTree]
    ) -> Mapping[str, int]:
        """How deep to draft, by tenant: decided once for all of a tenant's requests, by what is there on average."""
        by_tenant: dict[str, list[list[float]]] = {}
        for view in views:
            by_tenant.setdefault(view.tenant, []).append(reach_by_depth(beside(view)))
        limits = replace(budget, depth=min(budget.depth, self.drafter.deepest or budget.depth))
        return {
            tenant: self._paces.get(tenant)
            .budget(limits, len(views), [sum(depth) / len(own) for depth in zip_longest(*own, fillvalue=0.0)])
            .depth
            for tenant, own in by_tenant.items()
        }

    def _book(self, asked: _Asked, observation: Observation, share: float, others: int, all_nodes: int) -> None:
        """Note what one request's draft was worth in seconds: the plain rounds that its nodes made needless, less what
        their rows and drafting took. share: the request's, of this drafter's nodes; others: nodes that are not its own.
        """
        committed, tree, budget = observation.committed, observation.tree, asked.budget
        assert budget.price is not None
        pace = self._paces.get(observation.view.tenant)
        pace.observe_paying(_paying(asked.tree, budget.least_chance), committed)
        without = tree.keep({n for n, who in enumerate(tree.sources) if who != (self.drafter.name,)})
        won = len(follow(tree, committed)) - len(follow(without, committed))
        rows = budget.price(all_nodes) - budget.price(others)
        pace.observe_profit(budget.requests, won * budget.price(0) / budget.requests - share * rows - asked.seconds)
        if asked.tree.tokens:
            self._watch.count(self.drafter.name, useful=bool(follow(asked.tree, committed)))

    def _count(self, earnest: Mapping[str, bool]) -> frozenset[str]:
        """Count the round for each tenant. Returns those that the drafter follows no longer."""
        if not self._rests:
            return frozenset()
        gone: set[str] = set()
        for tenant, needed in earnest.items():
            duty = self._duties.get(tenant)
            was_awake = duty.awake
            duty.count(needed)
            if was_awake and not duty.awake:
                gone.add(tenant)
        return frozenset(gone)


def _paying(tree: DraftTree, least_chance: float) -> DraftTree:
    """The nodes that pay for their rows if they are as likely as the drafter says: twice the budget's least chance."""
    products = path_products(tree.parents, tree.scores)
    return tree.keep({node for node, chance in enumerate(products) if chance >= 2 * least_chance})


def reach_by_depth(tree: DraftTree) -> list[float]:
    """The chance that the accepted path reaches depth 1, 2, …, for a tree whose scores are chances."""
    reach: list[float] = []
    for depth, chance in zip(tree.depths(), path_products(tree.parents, tree.scores), strict=True):
        reach.extend([0.0] * (depth - len(reach)))
        reach[depth - 1] = min(reach[depth - 1] + chance, 1.0)
    return reach
