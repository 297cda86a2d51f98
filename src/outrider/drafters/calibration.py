"""What a drafter's scores are worth: online estimates of the probability that a draft node is accepted.

A score says how sure a drafter is, in its own currency. Here it becomes a probability, learned per drafter and request
from what was accepted, with what the other requests taught as the prior.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

from outrider.core.tree import ROOT, DraftTree

_SCORE_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99)
"""Bins of scores. Finer towards 1: over a path of sixteen nodes, 0.9 and 0.99 each are 0.19 and 0.85 together."""
_REQUEST_MEMORY = 0.97
_SHARED_MEMORY = 0.995
_SCORE_WEIGHT = 4.0
_SHARED_WEIGHT = 6.0

_Bucket = tuple[str, int, int]


@dataclass(slots=True)
class _Counts:
    """A Beta posterior's counts, of which old evidence fades: both shrink with every new observation."""

    accepted: float = 0.0
    total: float = 0.0

    def add(self, accepted: bool, memory: float) -> None:
        self.accepted = self.accepted * memory + accepted
        self.total = self.total * memory + 1.0

    def mean(self, prior: float, weight: float) -> float:
        """Posterior mean under a prior of that mean, worth ``weight`` observations."""
        return (self.accepted + weight * prior) / (self.total + weight)


def _no_counts() -> defaultdict[_Bucket, _Counts]:
    return defaultdict(_Counts)


@dataclass
class Calibrator:
    """Acceptance probabilities by (source, score, depth), for each request and, as its prior, for all together.

    The prior of the shared estimate is the score itself, so that an unknown drafter is taken at its word at first.
    Depth is binned by powers of two: after the first few tokens only the order of magnitude tells.

    A node that several drafters proposed counts as one of a source of its own ("suffix+recycle"): how much their
    agreement is worth depends on how alike they are, which is learned rather than assumed. (A noisy-or would take them
    to be independent.)

    Deterministic; knows no tenants, so state that must not be shared between tenants needs a Calibrator each.
    """

    _shared: defaultdict[_Bucket, _Counts] = field(default_factory=_no_counts)
    _requests: defaultdict[int, defaultdict[_Bucket, _Counts]] = field(default_factory=lambda: defaultdict(_no_counts))

    def probability(self, source: str, score: float, depth: int, request: int) -> float:
        """Chance that a node of this score and depth (1: child of the root) is accepted, given that its parent was."""
        return self._estimate(_bucket(source, score, depth), score, self._requests.get(request, {}))

    def record(self, source: str, score: float, depth: int, request: int, accepted: bool) -> None:
        """Learn what became of one node whose parent was accepted."""
        bucket = _bucket(source, score, depth)
        self._shared[bucket].add(accepted, _SHARED_MEMORY)
        self._requests[request][bucket].add(accepted, _REQUEST_MEMORY)

    def observe(self, tree: DraftTree, path: Sequence[int], request: int) -> None:
        """Learn from a verified tree. path: accepted nodes, top down (`Verdict.path`).

        A node tells something only if its parent was accepted; the root always was.
        """
        self._observe(tree, path, request, deepest=len(path) + 1)

    def observe_committed(self, tree: DraftTree, committed: Sequence[int], request: int) -> None:
        """Learn from a tree that was proposed, verified or not: a node is right if its path was committed.

        So a drafter whose nodes the planner stopped admitting still gets the chance to show that it has improved.
        """
        self._observe(tree, follow(tree, committed), request, deepest=len(committed))

    def calibrated(self, tree: DraftTree, request: int) -> DraftTree:
        """The tree with each node's `probability` in place of its score."""
        return replace(tree, scores=self._probabilities(tree, request))

    def path_probabilities(self, tree: DraftTree, request: int) -> list[float]:
        """For each node the chance that its whole path is accepted: the product of `probability` down to it."""
        return path_products(tree.parents, self._probabilities(tree, request))

    def forget(self, request: int) -> None:
        """Forget a request that has ended; what it taught stays in the shared estimates."""
        self._requests.pop(request, None)

    def _observe(self, tree: DraftTree, path: Sequence[int], request: int, deepest: int) -> None:
        depth_below = {node: depth for depth, node in enumerate((ROOT, *path), start=1)}
        for node, parent in enumerate(tree.parents):
            depth = depth_below.get(parent)
            if depth is not None and depth <= deepest:
                self.record(source_of(tree, node), tree.scores[node], depth, request, node in depth_below)

    def _probabilities(self, tree: DraftTree, request: int) -> list[float]:
        own: Mapping[_Bucket, _Counts] = self._requests.get(request, {})
        names = map("+".join, tree.sources) if tree.sources else repeat("", len(tree))
        return [
            self._estimate(_bucket(source, score, depth), score, own)
            for source, score, depth in zip(names, tree.scores, tree.depths(), strict=True)
        ]

    def _estimate(self, bucket: _Bucket, score: float, own: Mapping[_Bucket, _Counts]) -> float:
        shared = self._shared.get(bucket)
        if shared is None:
            return score
        estimate = shared.mean(score, _SCORE_WEIGHT)
        counts = own.get(bucket)
        return estimate if counts is None else counts.mean(estimate, _SHARED_WEIGHT)


def follow(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """The nodes that hold ``tokens`` one after another, from the root down, as far as the tree goes along."""
    path: list[int] = []
    at = ROOT
    for token in tokens:
        node = tree.places.get((at, token))
        if node is None:
            break
        path.append(node)
        at = node
    return path


def path_products(parents: Sequence[int], scores: Sequence[float]) -> list[float]:
    """For each node of a tree the product of the scores down to it."""
    products: list[float] = []
    for parent, score in zip(parents, scores, strict=True):
        products.append(score if parent == ROOT else score * products[parent])
    return products


def source_of(tree: DraftTree, node: int) -> str:
    """Who proposed a node, as one name; empty for a tree without sources."""
    return "+".join(tree.sources[node]) if tree.sources else ""


def _bucket(source: str, score: float, depth: int) -> _Bucket:
    return source, bisect_right(_SCORE_EDGES, score), min(depth.bit_length(), 4)
