"""Lookahead decoding: n-grams from a Jacobi iteration that runs beside the text, in rows of the same forward passes.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (2024). The lookahead branch is a
part of the draft tree, its support: level 0 of the window is a chain below the root, and at each of its positions hangs
the side chain of the later levels. So every row of it has a true context, and may be accepted as any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.core.tenants import TenantStore
from outrider.core.tree import ROOT, DraftTree, merge
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView, Wants
from outrider.drafters.cascade import cut
from outrider.drafters.growth import Limits, grow
from outrider.drafters.lookahead_pool import NgramPool, Origin
from outrider.drafters.lookahead_window import Window

_TEXT_NGRAM = 8
"""Tokens of the n-grams that are taken from the text, where longer ones cost nothing."""
_BRANCH_SCORE = 0.05
"""What a node is accepted with that is there for the branch alone."""
_WORTH_AT_FIRST = 0.25
_WORTH_WEIGHT = 16.0
_WORTH_MEMORY = 0.99


@dataclass
class _Worth:
    """Accepted tokens that only the branch knew of, for each round in which it was forwarded: fading sums.

    While the branch is not forwarded the estimate goes back to where it started, so that it gets another chance.
    """

    tokens: float = 0.0
    rounds: float = 0.0

    @property
    def value(self) -> float:
        return (self.tokens + _WORTH_WEIGHT * _WORTH_AT_FIRST) / (self.rounds + _WORTH_WEIGHT)

    def add(self, tokens: int, *, forwarded: bool) -> None:
        self.tokens = self.tokens * _WORTH_MEMORY + tokens
        self.rounds = self.rounds * _WORTH_MEMORY + forwarded


@dataclass
class _Request:
    pool: NgramPool
    window: Window | None


class LookaheadDrafter(Drafter):
    """Verifies n-grams of the pool that go on from the end of the text, and forwards the branch that finds new ones.

    The pool holds the n-grams of the prompt and the text as well. Whether the branch pays is for the planner to say:
    its worth is what was accepted thanks to it.
    """

    name = "lookahead"
    wants = Wants(top_k=1)
    default_tokens = 24

    def __init__(self, context: DrafterContext) -> None:
        self._config = context.config
        self._size = context.config.lookahead_ngram_size
        self._reach = max(self._size, _TEXT_NGRAM) - 1
        self._requests: dict[int, _Request] = {}
        self._worths: TenantStore[_Worth] = TenantStore(_Worth)

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [self._propose(view, Limits.of(view, budget)) for view in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            if observation.rows:
                self._observe(observation)

    def close(self, view: SequenceView) -> None:
        self._requests.pop(view.request_id, None)

    def _request(self, view: SequenceView) -> _Request:
        request = self._requests.get(view.request_id)
        if request is None:
            window = None
            # Side chains need a second child.
            if self._config.lookahead_window_size and self._config.tree_width != 1:
                width = self._config.lookahead_window_size
                window = Window(width, self._size - 1, view.tokens, view.sampling.end_ids)
            request = self._requests[view.request_id] = _Request(NgramPool(self._reach + 1), window)
        return request

    def _propose(self, view: SequenceView, limits: Limits) -> DraftTree:
        if not limits.nodes:
            return DraftTree()
        request = self._request(view)
        request.pool.extend(view.tokens)
        branch = self._branch(request, view, limits)
        nodes = limits.nodes - len(branch)
        verified = self._ngrams(request.pool, view.tokens, replace(limits, nodes=nodes))
        return cut(merge([verified, branch]), limits.nodes, self._config.tree_width)

    def _branch(self, request: _Request, view: SequenceView, limits: Limits) -> DraftTree:
        """The window's rows, or an empty tree where they leave no place for an n-gram, or do not fit at all."""
        if request.window is None:
            return DraftTree()
        chains = [DraftTree.chain(path, [_BRANCH_SCORE] * len(path)) for path in request.window.paths()]
        tree = merge(chains)
        if len(tree) + self._size - 1 > limits.nodes or max(map(len, chains)) > limits.depth:
            return DraftTree()
        worth = self._worths.get(view.tenant).value
        return DraftTree(
            tree.tokens, tree.parents, tree.scores, support=frozenset(range(len(tree))), support_worth=worth
        )

    def _ngrams(self, pool: NgramPool, tokens: Sequence[int], limits: Limits) -> DraftTree:
        """N-grams that go on from the text, and others that go on from them: a long copy is one after the other."""
        reach = self._reach

        def expand(context: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
            return [
                (found.token, found.score, (*context, found.token)[-reach:]) for found in pool.continuations(context)
            ]

        tree = grow(tuple(tokens[-reach:]), expand, limits, width=self._config.lookahead_verification_set_size)
        return _with_leaves(tree, self._config.lookahead_verification_set_size)

    def _observe(self, observation: Observation) -> None:
        request = self._request(observation.view)
        window, text = request.window, observation.view.tokens
        moved = len(observation.committed)
        if observation.top_ids is not None:
            guesses = observation.top_ids[:, 0].tolist()
            credit = _credit(request.pool, observation, self._reach)
            self._harvest(request.pool, observation, guesses)
            rows = _rows(observation.tree, window.paths()) if window is not None else []
            if window is not None and rows:
                for ngram in window.advance(observation.rows[0], [guesses[row] for row in rows]):
                    request.pool.add_guess(ngram, Origin.BRANCH)
                moved -= 1
            self._worths.get(observation.view.tenant).add(credit, forwarded=bool(rows))
        if window is not None:
            window.shift(text, moved)

    def _harvest(self, pool: NgramPool, observation: Observation, guesses: Sequence[int]) -> None:
        """What the target said after n-grams that were rejected, which comes free of charge."""
        tree, accepted = observation.tree, set(observation.path)
        text = observation.view.tokens
        before = text[: len(text) - len(observation.committed)][-self._size :]
        for node in range(len(tree)):
            if node + 1 not in accepted and node not in tree.support:
                ngram = [*before, *(tree.tokens[n] for n in tree.path(node)), guesses[node + 1]]
                pool.add_guess(ngram[-self._size :], Origin.ROW)


def _rows(tree: DraftTree, paths: Iterable[Sequence[int]]) -> list[int]:
    """The row at the end of each path, row 0 being the root's; empty if one is missing."""
    rows: list[int] = []
    for path in paths:
        at = ROOT
        for token in path:
            found = tree.places.get((at, token))
            if found is None:
                return []
            at = found
        rows.append(at + 1)
    return rows


def _credit(pool: NgramPool, observation: Observation, reach: int) -> int:
    """Accepted tokens that the pool, as it was before the round, would not have offered without the branch."""
    text = observation.view.tokens
    before = len(text) - len(observation.committed)
    credit = 0
    for at in range(before, min(before + len(observation.path) - 1, len(text))):
        offered = pool.continuations(text[max(0, at - reach) : at])
        credit += not any(found.token == text[at] and found.origin < Origin.BRANCH for found in offered)
    return credit


def _with_leaves(tree: DraftTree, most: int) -> DraftTree:
    """The tree without the nodes that would give it more than ``most`` leaves, those that came last first."""
    with_child: set[int] = set()
    kept: set[int] = set()
    leaves = 0
    for node, parent in enumerate(tree.parents):
        new_leaf = parent in with_child or parent == ROOT
        if (parent == ROOT or parent in kept) and (not new_leaf or leaves < most):
            kept.add(node)
            with_child.add(parent)
            leaves += new_leaf
    return tree if len(kept) == len(tree) else tree.keep(kept)
