"""The draft tree: what a drafter proposes for one request and one round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from outrider.core.errors import DraftError

if TYPE_CHECKING:
    import torch

_SUM_TOLERANCE = 1e-2

ROOT = -1
"""Parent of a node whose parent is the root, the last committed token (the root itself is not a node)."""


@dataclass(frozen=True)
class DraftTree:
    """A tree of proposed tokens below the last committed one. A chain is a tree with one path.

    Nodes are numbered 0 … n-1, every parent before its children, siblings in the order in which the drafter prefers
    them (rejection sampling tries them in that order) and with distinct tokens.

    tokens: token id of each node.
    parents: node number of each node's parent, or ROOT.
    scores: the drafter's own estimate, in [0, 1], that the node is accepted *given* that its parent was. It need not
        be calibrated: the engine learns what a drafter's scores are worth.
    logprobs: for a drafter that samples, the log-probabilities [V] (float32) that the children of a node (or of ROOT)
        were drawn from. A node that is missing here has children that were chosen, not drawn (a point mass).
    sources: names of the drafters that proposed each node; filled in by the engine or the cascade.
    support: nodes that are to be forwarded for what their rows teach the drafter, accepted or not. Closed upwards: the
        parent of one is the root or another. They go along together or not at all; a tree that has lost one has no
        support, and what is left of it are ordinary nodes.
    support_worth: committed tokens that forwarding the support is expected to bring to later rounds.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    scores: Sequence[float] = ()
    logprobs: Mapping[int, torch.Tensor] = field(default_factory=dict)
    sources: Sequence[tuple[str, ...]] = ()
    support: frozenset[int] = frozenset()
    support_worth: float = 0.0

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        scores: Sequence[float] | None = None,
        logprobs: Sequence[torch.Tensor] | None = None,
    ) -> DraftTree:
        """One path. ``logprobs[i]`` [V] is the distribution that ``tokens[i]`` was drawn from."""
        n = len(tokens)
        return cls(
            tokens=list(tokens),
            parents=list(range(-1, n - 1)),
            scores=list(scores) if scores is not None else [0.5] * n,
            logprobs={i - 1: row for i, row in enumerate(logprobs or ())},
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def places(self) -> dict[tuple[int, int], int]:
        """The node that holds a token below a parent (ROOT included), by (parent, token). Not to be changed."""
        return {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True))}

    def children(self) -> dict[int, list[int]]:
        """Children of every inner node, by parent (ROOT included), in the drafter's order."""
        table: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            table.setdefault(parent, []).append(node)
        return table

    def depths(self) -> list[int]:
        """Depth of each node; a child of the root has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent != ROOT else 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node``, which is the last one."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def keep(self, nodes: Iterable[int]) -> DraftTree:
        """The subtree of the given nodes. A node whose parent is not kept is dropped as well, and a support that is no
        longer whole is none.
        """
        wanted = set(nodes)
        new_number: dict[int, int] = {ROOT: ROOT}
        order: list[int] = []
        for node, parent in enumerate(self.parents):
            if node in wanted and parent in new_number:
                new_number[node] = len(order)
                order.append(node)
        whole = self.support <= new_number.keys()
        return DraftTree(
            tokens=[self.tokens[i] for i in order],
            parents=[new_number[self.parents[i]] for i in order],
            scores=[self.scores[i] for i in order],
            logprobs={new_number[i]: row for i, row in self.logprobs.items() if i in new_number},
            sources=[self.sources[i] for i in order] if self.sources else (),
            support=frozenset(new_number[i] for i in self.support) if whole else frozenset(),
            support_worth=self.support_worth if whole else 0.0,
        )

    def check(self, vocab_size: int) -> None:
        """Raise DraftError unless every promise of the class is kept."""
        n = len(self.tokens)
        if not len(self.parents) == len(self.scores) == n or (self.sources and len(self.sources) != n):
            raise DraftError("draft tree with fields of different lengths")
        for node, (token, parent, score) in enumerate(zip(self.tokens, self.parents, self.scores, strict=True)):
            if not 0 <= token < vocab_size:
                raise DraftError(f"draft token {token} is outside the target's vocabulary of {vocab_size}")
            if not ROOT <= parent < node:
                raise DraftError(f"draft node {node} has parent {parent}; parents come before their children")
            if not 0 <= score <= 1:  # NaN included
                raise DraftError(f"draft node {node} has score {score}; a score is a probability")
        if len(self.places) < n:
            (parent, token), _ = Counter(zip(self.parents, self.tokens, strict=True)).most_common(1)[0]
            raise DraftError(f"two children of draft node {parent} hold token {token}")
        if self.support:
            self._check_support()
        if self.logprobs:
            self._check_logprobs(vocab_size)

    def _check_support(self) -> None:
        for node in self.support:
            if not 0 <= node < len(self.tokens):
                raise DraftError(f"draft support has node {node}, of {len(self.tokens)}")
            if self.parents[node] not in (ROOT, *self.support):
                raise DraftError(f"draft node {node} is support and its parent {self.parents[node]} is not")
        if not (math.isfinite(self.support_worth) and self.support_worth >= 0):
            raise DraftError(f"draft support is worth {self.support_worth} tokens; it must be a number from 0 on")

    def _check_logprobs(self, vocab_size: int) -> None:
        children = self.children()
        for node, row in self.logprobs.items():
            if not ROOT <= node < len(self.tokens) or tuple(row.shape) != (vocab_size,):
                raise DraftError(f"draft log-probabilities of node {node} have shape {tuple(row.shape)}")
            total = float(row.double().exp().sum())
            if not abs(total - 1) <= _SUM_TOLERANCE:  # NaN included
                raise DraftError(f"draft log-probabilities of node {node} add up to {total:.3g}, not to 1")
            for child in children.get(node, ()):
                if math.isinf(float(row[self.tokens[child]])):
                    raise DraftError(f"draft node {child} was drawn with probability zero")


EMPTY = DraftTree()
"""The tree of a request that gets no draft."""


def merge(trees: Iterable[DraftTree]) -> DraftTree:
    """One tree that holds every path of ``trees``, shared prefixes once.

    A node proposed by several takes the highest score and all their sources. Distributions are dropped where the
    trees disagree on how a node's children came about (children of two drafters were not drawn from one of them).
    Supports are joined, and are worth what they are worth together.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    sources: list[tuple[str, ...]] = []
    logprobs: dict[int, torch.Tensor] = {}
    place: dict[tuple[int, int], int] = {}
    proposers: Counter[int] = Counter()
    support: set[int] = set()
    worth = 0.0
    for tree in trees:
        numbers: list[int] = []
        names_of = tree.sources or ((),) * len(tree)
        for token, parent, score, names in zip(tree.tokens, tree.parents, tree.scores, names_of, strict=True):
            above = ROOT if parent == ROOT else numbers[parent]
            at = place.setdefault((above, token), len(tokens))
            numbers.append(at)
            if at == len(tokens):
                tokens.append(token)
                parents.append(above)
                scores.append(score)
                sources.append(names)
            else:
                scores[at] = max(scores[at], score)
                sources[at] += tuple(name for name in names if name not in sources[at])
        proposers.update({ROOT if node == ROOT else numbers[node] for node in set(tree.parents)})
        logprobs |= {ROOT if node == ROOT else numbers[node]: row for node, row in tree.logprobs.items()}
        support.update(numbers[node] for node in tree.support)
        worth += tree.support_worth
    shared = {node: row for node, row in logprobs.items() if proposers[node] <= 1}
    return DraftTree(tokens, parents, scores, shared, sources, frozenset(support), worth)
