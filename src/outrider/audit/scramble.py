"""A drafter between another one and the engine that makes every round's draft as odd as the contract allows.

For audits: what an executor verifies then varies in length, shape and order from round to round, and neither that nor
the tokens in it may change what is committed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.core.errors import DraftError
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, Wants

if TYPE_CHECKING:
    from outrider.drafters.base import Observation, SequenceView


class Scrambled(Drafter):
    """Asks ``inner`` for drafts under a random budget, hangs random tokens into them, and numbers the nodes anew.

    Each round has a budget of nodes and depth of its own, and each request keeps a random part of what was drafted for
    it. What room is left takes random tokens below random nodes, with chains among them. The same ``seed`` and the same
    requests give the same drafts.
    """

    def __init__(self, inner: Drafter, seed: int = 0) -> None:
        self.name = inner.name
        self.default_tokens = inner.default_tokens
        self.needs_model, self.minds_price = inner.needs_model, inner.minds_price
        self._inner = inner
        self._random = random.Random(seed)

    @property
    def wants(self) -> Wants:  # type: ignore[override]
        return self._inner.wants

    def open(self, view: SequenceView) -> None:
        self._inner.open(view)

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        nodes = self._random.randint(0, budget.nodes)
        depth = self._random.randint(1, max(1, budget.depth))
        if not nodes:
            return [DraftTree() for _ in views]
        trees = self._inner.propose(views, replace(budget, nodes=nodes, depth=depth))
        return [self._scrambled(view, tree, budget) for view, tree in zip(views, trees, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._inner.observe(observations)

    def take_failures(self) -> Mapping[str, frozenset[int]]:
        return self._inner.take_failures()

    def pause(self, view: SequenceView) -> None:
        self._inner.pause(view)

    def close(self, view: SequenceView) -> None:
        self._inner.close(view)

    def _scrambled(self, view: SequenceView, tree: DraftTree, budget: Budget) -> DraftTree:
        if tree.logprobs:
            raise DraftError("a tree that was drawn from a distribution must stay as it is; scramble under 'coupled'")
        share = self._random.random()
        kept = tree.keep(node for node in range(len(tree)) if self._random.random() < share)
        grown = self._with_strangers(view, kept, self._random.randint(len(kept), budget.nodes), budget.depth)
        return self._renumbered(grown)

    def _with_strangers(self, view: SequenceView, tree: DraftTree, nodes: int, depth: int) -> DraftTree:
        """The tree with random tokens in it, up to ``nodes`` nodes. Half of them prolong what came last: chains."""
        tokens, parents = list(tree.tokens), list(tree.parents)
        depths = {ROOT: 0} | dict(enumerate(tree.depths()))
        taken = set(zip(parents, tokens, strict=True))
        for _ in range(nodes - len(tokens)):
            parent = self._random.choice([self._random.randint(ROOT, len(tokens) - 1), len(tokens) - 1])
            token = self._random.randrange(view.sampling.vocab_size)
            if depths[parent] < min(depth, view.room) and (parent, token) not in taken:
                taken.add((parent, token))
                depths[len(tokens)] = depths[parent] + 1
                tokens.append(token)
                parents.append(parent)
        return DraftTree(tokens, parents, [self._random.random() for _ in tokens])

    def _renumbered(self, tree: DraftTree) -> DraftTree:
        """The same tree in another order, parents still before their children."""
        children = tree.children()
        ready = list(children.get(ROOT, ()))
        order: list[int] = []
        while ready:
            node = ready.pop(self._random.randrange(len(ready)))
            order.append(node)
            ready.extend(children.get(node, ()))
        number = {ROOT: ROOT} | {node: at for at, node in enumerate(order)}
        return DraftTree(
            [tree.tokens[node] for node in order],
            [number[tree.parents[node]] for node in order],
            [tree.scores[node] for node in order],
        )
