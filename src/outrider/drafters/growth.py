"""Growing a draft tree best path first, within the limits of a round."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Generic, TypeVar

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, SequenceView

State = TypeVar("State")


@dataclass(frozen=True)
class Limits:
    """What one tree may be: nodes and depth at most, the tokens after which nothing can follow, and the least
    probability of a path that is worth a node.
    """

    nodes: int
    depth: int
    end_ids: frozenset[int]
    least_chance: float = 0.0

    @classmethod
    def of(cls, view: SequenceView, budget: Budget) -> Limits:
        """The budget, cut to what the request still has room for."""
        depth = max(0, min(budget.depth, view.room))
        return cls(max(0, budget.nodes) if depth else 0, depth, view.sampling.end_ids, budget.least_chance)


@dataclass(slots=True)
class _Siblings(Generic[State]):
    """The candidates below one node that are not in the tree yet, best first. above: probability of the node's path."""

    parent: int
    depth: int
    above: float
    candidates: Iterator[tuple[int, float, State]]


def grow(
    start: State,
    expand: Callable[[State], Iterable[tuple[int, float, State]]],
    limits: Limits,
    *,
    width: int | None = None,
    floor: float = 0.0,
) -> DraftTree:
    """The tree of the most probable paths that ``expand`` knows of.

    start: state of the root. expand: state -> (token, score, state after that token) for each candidate, best first
    and with distinct tokens. width: candidates per node that are considered. floor: least path probability of a node,
    beside that of ``limits``.

    A path's probability is the product of its scores, so it never rises on the way down, and taking the best open
    candidate again and again yields the best tree there is. Only as many candidates are looked at as can be taken.
    """
    floor = max(floor, limits.least_chance)
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    serial = count()
    heap: list[tuple[float, int, _Siblings[State], tuple[int, float, State]]] = []

    def offer(siblings: _Siblings[State]) -> None:
        """Let the next of them wait for its turn; those behind it, which are worth no more, come after it."""
        candidate = next(siblings.candidates, None)
        if candidate is not None and (probability := siblings.above * candidate[1]) >= floor:
            heapq.heappush(heap, (-probability, next(serial), siblings, candidate))

    if limits.nodes and limits.depth:
        offer(_Siblings(ROOT, 1, 1.0, islice(expand(start), width)))
    while heap:
        negated, _, siblings, (token, score, state) = heapq.heappop(heap)
        tokens.append(token)
        parents.append(siblings.parent)
        scores.append(score)
        if len(tokens) == limits.nodes:
            break
        offer(siblings)
        if siblings.depth < limits.depth and token not in limits.end_ids:
            offer(_Siblings(len(tokens) - 1, siblings.depth + 1, -negated, islice(expand(state), width)))
    return DraftTree(tokens, parents, scores)
