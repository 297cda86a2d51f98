"""The planner: speculation is a bet with a price, and this is where it is placed.

A round over B running requests emits B tokens for certain and, for each draft node it verifies, one more with the
probability that the node's whole path is accepted. It costs the time of a forward pass over B + n rows, plus drafting.
The planner takes the n nodes, of all requests together, that promise the most tokens per second; n = 0 is plain
decoding. What it decides changes the clock only, never the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.drafters.base import Budget
from outrider.drafters.calibration import follow

if TYPE_CHECKING:
    from outrider.core.config import SpeculativeConfig
    from outrider.core.tree import DraftTree
    from outrider.drafters.base import Drafter
    from outrider.drafters.calibration import Calibrator
    from outrider.engine.request import Request
    from outrider.executors.base import CostCurve

_FORGET = 0.1
_PROBE_EVERY = 16
_CHEAP = 0.02


class ForwardPrice:
    """Seconds of a forward pass by number of rows: the measured curve, kept up to date by every round.

    Each observation moves the two measured points around it, so that a machine that gets slower, or a context that gets
    longer, is seen within some tens of rounds.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._rows = list(curve.rows)
        self._seconds = list(curve.seconds)

    def at(self, rows: int) -> float:
        """Estimated seconds for ``rows`` rows."""
        if len(self._rows) == 1:
            return self._seconds[0]
        hi = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        x0, x1, y0, y1 = self._rows[hi - 1], self._rows[hi], self._seconds[hi - 1], self._seconds[hi]
        return y0 + max(y1 - y0, 0.0) * (rows - x0) / (x1 - x0)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one forward pass. Passes far beyond the curve (prefill) are left out."""
        if rows > 2 * self._rows[-1]:
            return
        error = seconds - self.at(rows)
        hi = min(bisect_left(self._rows, rows), len(self._rows) - 1)
        lo = max(hi - 1, 0)
        span = self._rows[hi] - self._rows[lo]
        near = min(max((rows - self._rows[lo]) / span, 0.0), 1.0) if span else 1.0
        self._seconds[hi] = max(self._seconds[hi] + _FORGET * near * error, 1e-9)
        if lo != hi:
            self._seconds[lo] = max(self._seconds[lo] + _FORGET * (1 - near) * error, 1e-9)


@dataclass
class _DraftPrice:
    """Seconds that drafting takes per level of depth, as a running mean."""

    per_level: float = 0.0

    def observe(self, seconds: float, depth: int) -> None:
        if depth > 0:
            weight = _FORGET if self.per_level else 1.0
            self.per_level += weight * (seconds / depth - self.per_level)


class Planner:
    """Sets each round's budget before drafting, and picks among the drafted nodes before verification."""

    def __init__(
        self, config: SpeculativeConfig, drafter: Drafter, calibrator: Calibrator, price: ForwardPrice | None
    ) -> None:
        """``price``: None if the planner is not to adapt; every round then drafts its whole budget."""
        self._nodes = config.num_speculative_tokens or drafter.default_tokens
        self._depth = config.max_draft_depth or self._nodes
        self._calibrator = calibrator
        self._price = price
        self._draft = _DraftPrice()
        self._accept_by_depth: list[float] = []
        self._rounds = 0

    @property
    def max_nodes(self) -> int:
        """Draft nodes that one request may have in a round."""
        return self._nodes

    def budget(self, batch_size: int) -> Budget:
        """Limits for the coming round. A drafter that costs real time is asked for no more depth than pays."""
        full = Budget(self._nodes, self._depth)
        if self._price is None or not self._accept_by_depth:
            return full
        plain = self._price.at(batch_size)
        if self._draft.per_level < _CHEAP * plain:
            return full
        best, best_rate, expected, reach = 0, batch_size / plain, 1.0, 1.0
        for depth in range(1, self._depth + 1):
            known = self._accept_by_depth
            reach *= known[min(depth, len(known)) - 1]
            expected += reach
            seconds = self._price.at(batch_size * (1 + depth)) + depth * self._draft.per_level
            if batch_size * expected / seconds > best_rate:
                best, best_rate = depth, batch_size * expected / seconds
        self._rounds += 1
        if best < self._depth and self._rounds % _PROBE_EVERY == 0:
            # What lies deeper is never seen otherwise, and may have become worth its price.
            best += 1
        return Budget(self._nodes if best else 0, best)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Keep the nodes that raise the expected tokens per second, over all requests together.

        A node's estimate is never above its parent's, so that the best n nodes always form trees.
        """
        ranked: list[tuple[float, int, int]] = []
        for which, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            probabilities = self._calibrator.path_probabilities(tree, request.view.request_id)
            ranked.extend((-p, which, node) for node, p in enumerate(probabilities))
        ranked.sort()
        count = self._best_count(len(requests), [-p for p, _, _ in ranked])
        if count == len(ranked):
            return list(trees)
        kept: list[set[int]] = [set() for _ in trees]
        for _, which, node in ranked[:count]:
            kept[which].add(node)
        return [tree.keep(nodes) if len(nodes) < len(tree) else tree for tree, nodes in zip(trees, kept, strict=True)]

    def _best_count(self, batch_size: int, probabilities: Sequence[float]) -> int:
        """How many of the nodes, best first, to verify. Every count is tried: the price need not be convex."""
        if self._price is None:
            return len(probabilities)
        expected = float(batch_size)
        best, best_rate = 0, expected / self._price.at(batch_size)
        for count, probability in enumerate(probabilities, start=1):
            expected += probability
            rate = expected / self._price.at(batch_size + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def observe_forward(self, rows: int, seconds: float) -> None:
        """Learn what a round's forward pass of ``rows`` rows took."""
        if self._price is not None:
            self._price.observe(rows, seconds)

    def observe_draft(self, trees: Sequence[DraftTree], seconds: float) -> None:
        """Learn what drafting these trees took."""
        self._draft.observe(seconds, max((max(tree.depths(), default=0) for tree in trees), default=0))

    def observe_committed(self, request: Request, proposed: DraftTree, committed: Sequence[int]) -> None:
        """Learn which proposed nodes were right, verified or not: what was left out may have become worth its price."""
        if not proposed.tokens:
            return
        self._calibrator.observe_committed(proposed, committed, request.view.request_id)
        reached = len(follow(proposed, committed))
        for depth in range(1, min(max(proposed.depths()), reached + 1, len(committed)) + 1):
            if len(self._accept_by_depth) < depth:
                self._accept_by_depth.append(self._accept_by_depth[-1] if self._accept_by_depth else 0.7)
            hit = float(depth <= reached)
            self._accept_by_depth[depth - 1] += _FORGET * (hit - self._accept_by_depth[depth - 1])

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._calibrator.forget(request.view.request_id)
