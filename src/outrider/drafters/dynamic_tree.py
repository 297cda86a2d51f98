"""EAGLE-2's dynamic tree: level by level the most probable nodes are expanded, and the best of all are proposed.

Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024). The nodes of a level are one
array, since what Python does at each of them would cost as much as the forward pass that it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.cost import another_level_pays
from outrider.drafters.draft_growth import AsDrawn
from outrider.drafters.head_children import Ids, Scores, children_of

if TYPE_CHECKING:
    from outrider.drafters.base import SequenceView
    from outrider.drafters.growth import Limits
    from outrider.drafters.guesses import Guesses

ROWS_PER_LEVEL = 8
"""Nodes that a level forwards at most: beyond the eight best there is hardly one whose children get into the tree."""

_ROW_SHARE = 0.08
"""What a row costs of its level: a head reads its weights once for all of them, so that rows are cheap, not free."""


class DynamicTree:
    """One request's tree in one round. Alternate `expand` (ROOT first) and `frontier`, until that is empty.

    cost_ratio: a level's cost in units of what else a round costs; growing ends when a further level no longer raises
    expected tokens per unit of cost. None: grow to the limits.
    """

    def __init__(self, view: SequenceView, limits: Limits, width: int, cost_ratio: float | None) -> None:
        self.view = view
        self._limits = limits
        self._width = width
        self._cost_ratio = cost_ratio
        self._tokens: Ids = np.empty(0, np.int64)
        self._parents: Ids = np.empty(0, np.int64)
        self._scores: Scores = np.empty(0)
        self._products: Scores = np.empty(0)
        self._newest = 0
        self._levels = 0
        self._forwarded: Ids = np.array([ROOT])
        self._paths: Ids = np.empty((1, 0), np.int64)

    def expand(self, nodes: Sequence[int], guesses: Guesses) -> None:
        """Give the nodes of the last `frontier`, or the root, their children. Raises NonFiniteLogitsError."""
        guesses.check()
        tokens, scores = children_of(self.view, guesses, self._paths, self._width)
        above = self._products[self._forwarded] if self._levels else np.ones(1)
        products = scores * above[:, None]
        kept = products > self._limits.least_chance
        parents = np.broadcast_to(self._forwarded[:, None], tokens.shape)
        self._levels += 1
        self._newest = len(self._tokens)
        self._tokens = np.concatenate([self._tokens, tokens[kept]])
        self._parents = np.concatenate([self._parents, parents[kept]])
        self._scores = np.concatenate([self._scores, scores[kept]])
        self._products = np.concatenate([self._products, products[kept]])

    def frontier(self) -> list[int]:
        """Nodes of the newest level that are to be forwarded, so that they can have children; empty: done."""
        if self._levels >= self._limits.depth:
            return []
        fresh = self._products[self._newest :]
        best = np.sort(self._products)[::-1][: self._limits.nodes]
        # With the limit reached, a node can only have children among the best if it is better than the worst of them.
        bar = best[-1] if len(best) == self._limits.nodes else 0.0
        chosen: list[int] = []
        for node in (self._newest + np.argsort(-fresh, kind="stable")).tolist():
            if len(chosen) == ROWS_PER_LEVEL or self._products[node] <= bar:
                break
            if self._tokens[node] not in self._limits.end_ids:
                chosen.append(node)
        chosen = self._paying(chosen, best)
        if not chosen:
            return []
        self._descend(np.array(sorted(chosen)))
        return [int(node) for node in self._forwarded]

    def place(self, node: int) -> tuple[int, int]:
        """A node's token, and its parent."""
        return int(self._tokens[node]), int(self._parents[node])

    def tree(self) -> DraftTree:
        """The best nodes, as many as the limit allows. On a tie the earlier node wins, parents before children."""
        kept = np.sort(np.argsort(-self._products, kind="stable")[: self._limits.nodes])
        number = np.full(len(self._tokens) + 1, ROOT)
        number[kept] = np.arange(len(kept))
        parents = number[self._parents[kept]]
        return DraftTree(self._tokens[kept].tolist(), parents.tolist(), self._scores[kept].tolist())

    def _descend(self, nodes: Ids) -> None:
        """Make ``nodes``, children of those that were forwarded last, the ones to be forwarded next."""
        rows = np.searchsorted(self._forwarded, self._parents[nodes])
        self._paths = np.concatenate([self._paths[rows], self._tokens[nodes, None]], axis=1)
        self._forwarded = nodes

    def _paying(self, chosen: list[int], best: Scores) -> list[int]:
        """Those of ``chosen`` whose children are expected to be worth their rows, if together they are worth the level.

        A node's children are expected to bring what `draft_growth.BestPaths` expects of them.
        """
        if self._cost_ratio is None or not chosen:
            return chosen
        gains = self._products[chosen] ** (1 + 1 / self._levels)
        expected = 1 + float(best.sum())
        if not another_level_pays(float(gains.sum()), expected, self._levels, self._cost_ratio):
            return []
        bar = _ROW_SHARE * expected * self._cost_ratio / (1 + self._levels * self._cost_ratio)
        return [node for node, gain in zip(chosen, gains.tolist(), strict=True) if gain >= bar]


class DrawnTree:
    """`draft_growth.AsDrawn`, for rules that compare p with q, over a learned drafter's guesses; used as `DynamicTree`.

    q is the transformed distribution over all that the drafter has columns for; any other token has none of it.
    """

    def __init__(self, view: SequenceView, limits: Limits, width: int) -> None:
        self.view = view
        self._growth = AsDrawn(view, limits, width)

    def expand(self, nodes: Sequence[int], guesses: Guesses) -> None:
        size = self.view.sampling.vocab_size
        self._growth.expand(nodes, [guesses.full_logits(row, size) for row in range(len(nodes))])

    def frontier(self) -> list[int]:
        return self._growth.frontier()

    def place(self, node: int) -> tuple[int, int]:
        return self._growth.tokens[node], self._growth.parents[node]

    def tree(self) -> DraftTree:
        return self._growth.tree()
