"""The drafters in use: one for each method that a running request asked for, and how each is let run ahead."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.core.errors import DraftError
from outrider.core.tenants import SharedStore, owner_of
from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget
from outrider.drafters.pace import paces_of
from outrider.engine.request import trim

if TYPE_CHECKING:
    from outrider.core.config import SpeculativeConfig, SpeculativeOverride
    from outrider.core.tenants import TenantStore
    from outrider.drafters.base import Drafter, Observation
    from outrider.drafters.pace import Pace
    from outrider.engine.price import ForwardPrice
    from outrider.engine.request import Request

log = logging.getLogger(__name__)

_MOST_OTHERS = 64
"""Ways to speculate, beside the engine's own, that are kept for the next request that asks for the same. One that two
API keys ask for counts twice.
"""

_SLACK = 0.5
_SOME_ROWS = (1, 2, 4, 8, 16, 32)


@dataclass(eq=False)
class Speculator:
    """One method in use, whoever asked for it. Requests of the same method are drafted for in one call."""

    drafter: Drafter
    paces: TenantStore[Pace] = field(init=False)

    def __post_init__(self) -> None:
        self.paces = paces_of(self.drafter)


@dataclass(frozen=True)
class Speculation:
    """How one request is drafted for: by whom, and how much at most."""

    speculator: Speculator
    full: Budget

    @property
    def drafter(self) -> Drafter:
        return self.speculator.drafter

    def pace(self, request: Request) -> Pace:
        return self.speculator.paces.get(request.view.tenant)


@dataclass(frozen=True)
class Proposal:
    """A drafter's checked tree for one request. most: nodes that it was asked for. seconds: the request's part of the
    time that drafting took.
    """

    tree: DraftTree
    most: int
    seconds: float


class Speculators:
    """Every call to a drafter goes through here: whatever one raises costs a round's draft and nothing else."""

    def __init__(
        self,
        drafter: Drafter,
        config: SpeculativeConfig,
        make: Callable[[Sequence[str]], Drafter],
        *,
        chains_only: bool,
    ) -> None:
        """drafter: the engine's own, which ``config`` is about. make: builds the drafter of other methods, by names.

        chains_only: the rule cannot judge trees.
        """
        self._config = config
        self._chains_only = chains_only
        self._default = Speculator(drafter)
        # Requests that are drafted for by one that is given up keep it as long as they run.
        self._others: SharedStore[tuple[str, ...], Speculator] = SharedStore(
            lambda members: Speculator(make(members)), _MOST_OTHERS
        )
        self.failures = 0
        self.failures_by_drafter: Counter[str] = Counter()

    def choose(self, override: SpeculativeOverride | None, tenant: str) -> Speculation:
        """How a request of the tenant is to be drafted for. Raises ConfigError or UnknownNameError for what cannot be
        had.
        """
        speculator = self._speculator(override.members, tenant) if override is not None else self._default
        own = self._config.num_speculative_tokens if speculator is self._default else None
        asked = override.num_speculative_tokens if override is not None else None
        drafter = speculator.drafter
        nodes = asked or own or drafter.default_tokens
        depth = self._config.max_draft_depth or nodes
        return Speculation(speculator, Budget(nodes, min(depth, drafter.deepest or depth)))

    def _speculator(self, members: tuple[str, ...], tenant: str) -> Speculator:
        if not members or members == self._config.members:
            return self._default
        return self._others.get(members, owner_of(tenant))

    # -- the life of a request -----------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        self._call(request.speculation.drafter, lambda: request.speculation.drafter.open(request.view), [request])

    def pause(self, request: Request) -> None:
        """The request has to wait for memory."""
        self._call(request.speculation.drafter, lambda: request.speculation.drafter.pause(request.view), [])

    def close(self, request: Request) -> None:
        self._call(request.speculation.drafter, lambda: request.speculation.drafter.close(request.view), [])

    def propose(
        self, requests: Sequence[Request], batch_size: int, price: ForwardPrice | None, vocab_size: int
    ) -> dict[int, Proposal]:
        """Proposals by request id, for those of ``requests`` that it pays to ask for. price: None to ask in full."""
        groups: dict[tuple[Speculator, Budget], list[Request]] = {}
        decided: dict[tuple[Pace, Budget], Budget] = {}
        for request in requests:
            how = request.speculation
            budget = how.full
            if price is not None and budget.nodes:
                pace = how.pace(request)
                if (pace, budget) not in decided:
                    decided[pace, budget] = pace.budget(_priced(budget, batch_size, price), batch_size)
                budget = decided[pace, budget]
            if budget.nodes and request.view.room > 0:
                groups.setdefault((how.speculator, budget), []).append(request)
        proposals: dict[int, Proposal] = {}
        for (speculator, budget), members in groups.items():
            started = time.perf_counter()
            answer = self._ask(speculator.drafter, members, budget)
            trees = [self._checked(r, tree, budget, vocab_size) for r, tree in zip(members, answer, strict=False)]
            seconds = time.perf_counter() - started
            for draft in {speculator.paces.get(request.view.tenant).draft for request in members}:
                draft.observe(trees, seconds)
            for request, tree in zip(members, trees, strict=False):
                proposals[request.id] = Proposal(tree, budget.nodes, seconds / len(members))
        return proposals

    def observe(self, observations: Sequence[tuple[Request, Observation]]) -> None:
        """Tell each drafter what became of its requests."""
        groups: dict[Speculator, list[tuple[Request, Observation]]] = {}
        for request, observation in observations:
            groups.setdefault(request.speculation.speculator, []).append((request, observation))
        for speculator, told in groups.items():
            self._call(
                speculator.drafter,
                lambda drafter=speculator.drafter, told=told: drafter.observe([seen for _, seen in told]),  # type: ignore[misc]
                [request for request, seen in told if seen.rows],
            )

    # -- what may go wrong ---------------------------------------------------------------------------------------------

    def _ask(self, drafter: Drafter, requests: Sequence[Request], budget: Budget) -> list[DraftTree]:
        """One tree for each request, or none at all."""
        views = [request.view for request in requests]
        answer: list[DraftTree] = []
        raised: Exception | None = None
        try:
            trees = drafter.propose(views, budget)
            if len(trees) != len(views):
                raise DraftError(f"{len(trees)} draft trees for {len(views)} requests")
            answer = trees
        except Exception as error:
            raised = error
        hit = self._count_around(drafter, requests)
        # A cascade of which every member failed has said so of each of them.
        if raised is not None and (lost := [request for request in requests if request.id not in hit]):
            self._failed(drafter, raised, lost)
        return answer

    def _count_around(self, drafter: Drafter, requests: Sequence[Request]) -> frozenset[int]:
        """Count the failures that the drafter got around, or told of before it raised. Returns whom they hit."""
        around = drafter.take_failures()
        for name, lost in around.items():
            self.failures_by_drafter[name] += len(lost)
        hit = frozenset[int]().union(*around.values())
        self.failures += len(hit)
        _count_failure([request for request in requests if request.id in hit])
        return hit

    def _checked(self, request: Request, tree: DraftTree, budget: Budget, vocab_size: int) -> DraftTree:
        """The tree without useless nodes, its sources filled in; an empty one if the drafter broke its contract."""
        drafter = request.speculation.drafter
        try:
            tree.check(vocab_size)
            if len(tree) > budget.nodes:
                raise DraftError(f"{len(tree)} draft nodes, more than the {budget.nodes} asked for")
        except Exception as error:  # what is no tree at all fails in ways of its own
            self._failed(drafter, error, [request])
            return DraftTree()
        if not tree.sources:
            tree = replace(tree, sources=[(drafter.name,)] * len(tree))
        return trim(tree, request.view.room, request.sampling.end_ids, chain=self._chains_only)

    def _call(self, drafter: Drafter, call: Callable[[], object], affected: Sequence[Request]) -> None:
        try:
            call()
        except Exception as error:
            self._failed(drafter, error, affected)

    def _failed(self, drafter: Drafter, error: Exception, affected: Sequence[Request]) -> None:
        """Count a failure for the requests whose draft it cost. Said at the first one, the second, the fourth, …"""
        _count_failure(affected)
        self.failures += 1
        self.failures_by_drafter[drafter.name] += 1
        if self.failures & (self.failures - 1) == 0:
            reason = str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"
            log.warning(
                "drafter %s failed (%s), %d times so far; the round goes on without its draft",
                drafter.name,
                reason,
                self.failures,
            )


def _priced(budget: Budget, batch_size: int, price: ForwardPrice) -> Budget:
    """The budget for a round of that many requests, with what its nodes cost.

    A node pays if it is likelier than the tokens that its row's time would have brought in a plain round. Half of that
    is asked for, since what is never proposed is never seen to be likelier than its drafter thought.
    """
    plain = price.of_round(batch_size)
    rows = {min(budget.nodes, n) for n in _SOME_ROWS}
    cheapest = min((price.of_round(batch_size + n) - plain) / n for n in rows)
    least = _SLACK * batch_size * cheapest / plain
    return replace(
        budget,
        price=lambda nodes: price.of_round(batch_size + nodes),
        requests=batch_size,
        least_chance=max(least, 0.0),
    )


def _count_failure(requests: Sequence[Request]) -> None:
    for request in requests:
        request.statistics.failures += 1
