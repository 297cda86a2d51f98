"""The planner: speculation is a bet with a price, and this is where it is placed.

A round over B running requests emits B tokens for certain and, for each draft node it verifies, one more with the
probability that the node's whole path is accepted. It costs the time of a forward pass over B + n rows, plus drafting.
The planner takes the n nodes, of all requests together, that promise the most tokens per second; n = 0 is plain
decoding. What it decides changes the clock only, never the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.core.tenants import TenantStore
from outrider.core.tree import DraftTree
from outrider.drafters.calibration import Calibrator

if TYPE_CHECKING:
    from outrider.engine.price import ForwardPrice
    from outrider.engine.request import Request


class Planner:
    """Picks among the drafted nodes before verification, and sets how much of a prompt goes along with decoding."""

    def __init__(
        self, price: ForwardPrice | None, *, adaptive: bool = True, calibrator: Callable[[], Calibrator] = Calibrator
    ) -> None:
        """``price``: None to take every node, and to give prompts all the rows that are left. adaptive: False to take
        every node whatever it costs. calibrator: makes one for each tenant.
        """
        self._price = price
        self._adaptive = adaptive
        self._calibrators: TenantStore[Calibrator] = TenantStore(calibrator)

    @property
    def price(self) -> ForwardPrice | None:
        """The price list to plan drafts by; None if they are not to be adapted to it."""
        return self._price if self._adaptive else None

    def select(
        self, requests: Sequence[Request], trees: Sequence[DraftTree], batch_size: int, most: int
    ) -> list[DraftTree]:
        """Keep the nodes that raise the expected tokens per second, over all requests together; ``most`` at most.

        batch_size: requests that take part in the round, those without a tree included.
        A node's estimate is never above its parent's, so that the best n nodes always form trees. A tree's support goes
        along as a whole, at the price of its rows, where what it is worth to later rounds pays for them.
        """
        probabilities: list[Sequence[float]] = []
        for request, tree in zip(requests, trees, strict=True):
            calibrator = self._calibrators.get(request.view.tenant)
            probabilities.append(calibrator.path_probabilities(tree, request.view.request_id))
        best: _Choice | None = None
        for supported in _supported(trees, most):
            choice = self._choose(trees, probabilities, supported, batch_size, most)
            if best is None or choice.rate > best.rate:
                best = choice
        assert best is not None
        return [
            tree.keep(nodes) if len(nodes) < len(tree) else tree for tree, nodes in zip(trees, best.kept, strict=True)
        ]

    def profit(self, tree: DraftTree, emitted: int, nodes: Sequence[int]) -> float:
        """Seconds that verifying a request's tree has won, drafting not counted: what its tokens beyond the first would
        have taken in plain rounds, less the tree's part of what the round took longer. nodes: of each request's tree.
        """
        if self.price is None:
            return 0.0
        plain = self.price.of_round(len(nodes))
        longer = self.price.of_round(len(nodes) + sum(nodes)) - plain
        part = len(tree) / sum(nodes) if len(tree) else 0.0
        return (emitted - 1) * plain / len(nodes) - part * longer

    def chunk_beside(self, rows: int, most: int) -> int:
        """Prompt rows, ``most`` at most, to go along with ``rows`` rows of requests that decode."""
        return min(most, self._price.chunk_beside(rows)) if self._price is not None else most

    def observe_forward(self, rows: int, prompt_rows: int, seconds: float) -> None:
        """Learn what a forward pass took, of ``rows`` rows of requests that decode and ``prompt_rows`` of prompts."""
        if self._price is None or not rows:
            return
        if prompt_rows:
            self._price.observe_chunk(rows, prompt_rows, seconds)
        else:
            self._price.observe(rows, seconds)

    def observe_beside(self, seconds: float) -> None:
        """Learn what a round took beside its forward pass and its draft."""
        if self._price is not None:
            self._price.observe_beside(seconds)

    def observe_committed(self, request: Request, proposed: DraftTree, committed: Sequence[int]) -> None:
        """Learn which proposed nodes were right, verified or not: what was left out may have become worth its price."""
        if proposed.tokens:
            calibrator = self._calibrators.get(request.view.tenant)
            calibrator.observe_committed(proposed, committed, request.view.request_id)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._calibrators.get(request.view.tenant).forget(request.view.request_id)

    def _choose(
        self,
        trees: Sequence[DraftTree],
        probabilities: Sequence[Sequence[float]],
        supported: Collection[int],
        batch_size: int,
        most: int,
    ) -> _Choice:
        """The best nodes to go along with the support of the ``supported`` trees."""
        kept = [set(tree.support) if which in supported else set() for which, tree in enumerate(trees)]
        rows = sum(map(len, kept))
        expected = float(batch_size)
        for which in supported:
            expected += trees[which].support_worth + sum(probabilities[which][node] for node in kept[which])
        ranked = sorted(
            (-probability, which, node)
            for which, own in enumerate(probabilities)
            for node, probability in enumerate(own)
            if node not in kept[which]
        )[: most - rows]
        count, rate = self._best_count(batch_size, expected, rows, [-negated for negated, _, _ in ranked])
        for _, which, node in ranked[:count]:
            kept[which].add(node)
        return _Choice(rate, kept)

    def _best_count(
        self, batch_size: int, expected: float, rows: int, probabilities: Sequence[float]
    ) -> tuple[int, float]:
        """How many of the nodes, best first, to verify, and the tokens per second that this promises.

        expected: tokens without any of them; rows: draft rows without any of them. Every count is tried: the price need
        not be convex.
        """
        if self.price is None:
            return len(probabilities), 0.0
        if not rows and not probabilities:
            return 0, 0.0
        first, *prices = self.price.rising(batch_size + rows, 1 + len(probabilities))
        best, best_rate = 0, expected / first
        for count, (probability, seconds) in enumerate(zip(probabilities, prices, strict=True), start=1):
            expected += probability
            rate = expected / seconds
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate


@dataclass(frozen=True)
class _Choice:
    """kept: nodes to verify, of each tree. rate: tokens per second that they promise; 0 where no price is known."""

    rate: float
    kept: list[set[int]]


def _supported(trees: Sequence[DraftTree], most: int) -> Iterator[frozenset[int]]:
    """Which trees to forward with their support: as many as ``most`` rows hold at first, down to none, those with the
    most worth for a row to the last.
    """
    worth = {which: tree.support_worth / len(tree.support) for which, tree in enumerate(trees) if tree.support}
    order = sorted(worth, key=lambda which: -worth[which])
    for count in range(len(order), -1, -1):
        if sum(len(trees[which].support) for which in order[:count]) <= most:
            yield frozenset(order[:count])
