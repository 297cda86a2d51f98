"""The planner: speculation is a bet with a price, and this is where it is placed.

A round over B running requests emits B tokens for certain and, for each draft node it verifies, one more with the
probability that the node's whole path is accepted. It costs the time of a forward pass over B + n rows, plus drafting.
The planner takes the n nodes, of all requests together, that promise the most tokens per second; n = 0 is plain
decoding. What it decides changes the clock only, never the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.core.tree import DraftTree
from outrider.drafters.calibration import Calibrator
from outrider.drafters.tenants import TenantStore

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
        A node's estimate is never above its parent's, so that the best n nodes always form trees.
        """
        ranked: list[tuple[float, int, int]] = []
        for which, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            calibrator = self._calibrators.get(request.view.tenant)
            probabilities = calibrator.path_probabilities(tree, request.view.request_id)
            ranked.extend((-p, which, node) for node, p in enumerate(probabilities))
        ranked.sort()
        count = self._best_count(batch_size, [-p for p, _, _ in ranked[:most]])
        if count == len(ranked):
            return list(trees)
        kept: list[set[int]] = [set() for _ in trees]
        for _, which, node in ranked[:count]:
            kept[which].add(node)
        return [tree.keep(nodes) if len(nodes) < len(tree) else tree for tree, nodes in zip(trees, kept, strict=True)]

    def profit(self, tree: DraftTree, emitted: int, nodes: Sequence[int]) -> float:
        """Seconds that verifying a request's tree has won, drafting not counted: what its tokens beyond the first would
        have taken in plain rounds, less the tree's part of what the round took longer. nodes: of each request's tree.
        """
        if self.price is None:
            return 0.0
        plain = self.price.at(len(nodes))
        longer = self.price.at(len(nodes) + sum(nodes)) - plain
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

    def observe_committed(self, request: Request, proposed: DraftTree, committed: Sequence[int]) -> None:
        """Learn which proposed nodes were right, verified or not: what was left out may have become worth its price."""
        if proposed.tokens:
            calibrator = self._calibrators.get(request.view.tenant)
            calibrator.observe_committed(proposed, committed, request.view.request_id)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._calibrators.get(request.view.tenant).forget(request.view.request_id)

    def _best_count(self, batch_size: int, probabilities: Sequence[float]) -> int:
        """How many of the nodes, best first, to verify. Every count is tried: the price need not be convex."""
        if self.price is None or not probabilities:
            return len(probabilities)
        plain, *prices = self.price.rising(batch_size, 1 + len(probabilities))
        expected = float(batch_size)
        best, best_rate = 0, expected / plain
        for count, (probability, seconds) in enumerate(zip(probabilities, prices, strict=True), start=1):
            expected += probability
            rate = expected / seconds
            if rate > best_rate:
                best, best_rate = count, rate
        return best
