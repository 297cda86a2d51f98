"""Growing a draft tree best path first, within the limits of a round."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, SequenceView

State = TypeVar("State")


@dataclass(frozen=True)
class Limits:
    """What one tree may be: nodes and depth at most, and the tokens after which nothing can follow."""

    nodes: int
    depth: int
    end_ids: frozenset[int]

    @classmethod
    def of(cls, view: SequenceView, budget: Budget) -> Limits:
        """The budget, cut to what the request still has room for."""
        depth = max(0, min(budget.depth, view.room))
        return cls(max(0, budget.nodes) if depth else 0, depth, view.sampling.end_ids)


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
    and with distinct tokens. width: candidates per node that are considered. floor: least path probability of a node.

    A path's probability is the product of its scores, so it never rises on the way down, and taking the best open
    candidate again and again yields the best tree there is.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    heap: list[tuple[float, int, int, int, int, float, State]] = []
    serial = 0

    def offer(state: State, parent: int, depth: int, probability: float) -> None:
        nonlocal serial
        for rank, (token, score, after) in enumerate(expand(state)):
            if rank == width:
                break
            if probability * score >= floor:
                heapq.heappush(heap, (-probability * score, serial, parent, depth, token, score, after))
                serial += 1

    if limits.nodes and limits.depth:
        offer(start, ROOT, 1, 1.0)
    while heap and len(tokens) < limits.nodes:
        negated, _, parent, depth, token, score, state = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
        if depth < limits.depth and len(tokens) < limits.nodes and token not in limits.end_ids:
            offer(state, len(tokens) - 1, depth + 1, -negated)
    return DraftTree(tokens, parents, scores)
