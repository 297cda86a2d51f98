"""How a draft model's tree grows, one level per forward pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.cost import another_level_pays
from outrider.drafters.draft_children import Children, are_drawn, best_with_noise, drawn, most_likely

if TYPE_CHECKING:
    import torch

    from outrider.drafters.base import SequenceView
    from outrider.drafters.growth import Limits


_BEAM = 2
"""Nodes that a level may forward however deep the tree is to become."""


class Growth(ABC):
    """One request's tree in one round. Alternate `frontier` (which nodes to forward) and `expand` (their logits)."""

    def __init__(self, view: SequenceView, limits: Limits, width: int) -> None:
        self.view = view
        self.limits = limits
        self.width = width
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.products: list[float] = []
        self.depths: list[int] = []
        self.levels = 0
        self._newest = 0

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child down to ``node``."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def expand(self, nodes: Sequence[int], logits: Sequence[torch.Tensor]) -> None:
        """Give each of ``nodes`` (ROOT at first) the children that its row of logits [V] suggests: the next level."""
        self.levels += 1
        self._newest = len(self.tokens)
        for node, row in zip(nodes, logits, strict=True):
            for token, score in self._children(node, row):
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(score)
                self.products.append(score * (1.0 if node == ROOT else self.products[node]))
                self.depths.append(1 if node == ROOT else self.depths[node] + 1)

    def frontier(self) -> list[int]:
        """Nodes of the newest level that are to be forwarded, so that they can have children; empty: done."""
        if self.levels >= self.limits.depth:
            return []
        able = [n for n in range(self._newest, len(self.tokens)) if self.tokens[n] not in self.limits.end_ids]
        return sorted(self._worth_forwarding(able))

    @abstractmethod
    def tree(self) -> DraftTree:
        """What is proposed."""

    @abstractmethod
    def _children(self, node: int, logits: torch.Tensor) -> list[tuple[int, float]]: ...

    @abstractmethod
    def _worth_forwarding(self, able: list[int]) -> list[int]: ...


class BestPaths(Growth):
    """The tree of the highest path probabilities: only a node among the best so far can have children among the best.

    Of those, each level forwards the few best, so that over the whole depth no more rows are forwarded than nodes may
    be proposed: a level must not use up the rows of the ones below it.
    cost_ratio: a draft forward's cost in units of a target forward; growing ends when a further level no longer raises
    expected tokens per unit of cost. None: grow to the limits.
    """

    def __init__(self, view: SequenceView, limits: Limits, width: int, cost_ratio: float | None) -> None:
        super().__init__(view, limits, width)
        self._cost_ratio = cost_ratio
        self._per_level = max(_BEAM, limits.nodes // max(1, limits.depth - 1))
        self._forwarded = 0
        self._candidates: Callable[[SequenceView, torch.Tensor, Sequence[int], int], Children] = (
            most_likely if view.sampling.params.greedy else best_with_noise
        )

    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents, self.scores).keep(self._best())

    def _best(self) -> list[int]:
        """The best nodes, as many as the limit allows. On a tie the earlier node wins, parents before children."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.products[node])[: self.limits.nodes]

    def _children(self, node: int, logits: torch.Tensor) -> list[tuple[int, float]]:
        children = self._candidates(self.view, logits, self.path(node), self.width)
        return list(zip(children.tokens, children.scores, strict=True))

    def _worth_forwarding(self, able: list[int]) -> list[int]:
        best = self._best()
        # With the limit reached, a node can only have children among the best if it is better than the worst of them.
        bar = self.products[best[-1]] if len(best) == self.limits.nodes else 0.0
        chosen = [node for node in best if node in set(able) and self.products[node] > bar]
        chosen = chosen[: min(self._per_level, self.limits.nodes - self._forwarded)]
        if not self._pays(chosen, best):
            return []
        self._forwarded += len(chosen)
        return chosen

    def _pays(self, chosen: Sequence[int], best: Sequence[int]) -> bool:
        """Whether the children of ``chosen`` are expected to be worth a draft forward.

        If acceptance goes on as on the paths so far, they bring p^(1 + 1/depth) for a node of path probability p.
        """
        if self._cost_ratio is None:
            return True
        expected = 1 + sum(self.products[node] for node in best)
        gain = sum(math.pow(self.products[node], 1 + 1 / self.depths[node]) for node in chosen)
        return another_level_pays(gain, expected, self.levels, self._cost_ratio)


class AsDrawn(Growth):
    """A tree for rules that compare p with q. Whether a node is there may depend on its ancestors, never on its token.

    So a node's children come as a family: the first draws from its q, all of them kept. Each level expands its most
    probable nodes, as many as spread the budget over the whole depth; a node's own token may decide about its children.
    """

    def __init__(self, view: SequenceView, limits: Limits, width: int) -> None:
        super().__init__(view, limits, width)
        self._logprobs: dict[int, torch.Tensor] = {}
        families = max(1, limits.nodes // width)
        self._per_level = max(1, (families - 1) // max(1, limits.depth - 1))

    def tree(self) -> DraftTree:
        return DraftTree(self.tokens, self.parents, self.scores, self._logprobs)

    def _children(self, node: int, logits: torch.Tensor) -> list[tuple[int, float]]:
        # The limit cuts the last family after the same number of draws, whatever they are.
        count = min(self.width, self.limits.nodes - len(self.tokens))
        if count <= 0:
            return []
        children = drawn(self.view, logits, self.path(node), count)
        if children.logprobs is not None and children.tokens:
            self._logprobs[node] = children.logprobs
        return list(zip(children.tokens, children.scores, strict=True))

    def _worth_forwarding(self, able: list[int]) -> list[int]:
        if len(self.tokens) >= self.limits.nodes:
            return []
        return sorted(able, key=lambda node: -self.products[node])[: self._per_level]


def growth_for(view: SequenceView, limits: Limits, width: int, cost_ratio: float | None) -> Growth:
    """The way to grow that the request's acceptance rule and temperature call for."""
    if are_drawn(view):
        return AsDrawn(view, limits, width)
    return BestPaths(view, limits, width, cost_ratio)
