"""Medusa: several heads on the target's last hidden state, each for a token further on.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024). The heads do not
see each other's guesses, so that a tree of them is laid out without any further forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from outrider.core.errors import NonFiniteLogitsError
from outrider.core.noise import Stream
from outrider.core.tenants import TenantStore
from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView, Wants
from outrider.drafters.failures import Failures
from outrider.drafters.features import Features, States
from outrider.drafters.growth import Limits, grow
from outrider.drafters.guesses import CANDIDATES, Guesses
from outrider.drafters.head_accuracy import HeadAccuracy
from outrider.drafters.head_children import Ids, Scores, children_of
from outrider.drafters.medusa_heads import MedusaHeads

if TYPE_CHECKING:
    from outrider.heads.head import Head

_WIDTH = 8
"""Candidates of a head that are considered, unless the configuration says otherwise."""
_KINDS = 4
_ARGMAX, _GREEDY, _SHARED_NOISE, _OWN_NOISE = range(_KINDS)
"""What is told apart when accuracies are measured. Training measures those of the first: greedy, and nothing banned or
penalised, which would make another candidate the first."""

Path = tuple[int, ...]


@dataclass(frozen=True)
class _Offer:
    """A head's candidates after some path with its own scores, best first; and as they are rated by their accuracy."""

    tokens: Ids
    scores: Scores
    rated: Sequence[tuple[int, float]]


class MedusaDrafter(Drafter):
    """The sparse tree of the paths that are most likely right: the product, over a path, of how often head k's r-th
    candidate has been right where the tokens before it were, among those that it was as sure of. For plain
    greedy requests it starts from what training measured, if the head's file says so.

    With n the root's position, head k reads the state of position n - 1 and guesses the token at n + 1 + k.
    """

    name = "medusa"
    default_tokens = 24
    needs_model = True

    def __init__(self, context: DrafterContext, head: Head | None = None) -> None:
        """head: None for the one that the configuration names, or that the target comes with.

        Raises what `head_for` and `OpenExecutor.dense` raise.
        """
        if head is None:
            from outrider.drafters.heads import head_for

            head = head_for(context, self.name)
        self._heads = MedusaHeads(head, context.target, context.open_executor)
        self._features = Features(head, context)
        self._top_k = context.open_executor.top_k
        self._columns = None if head.draft_ids is None else head.draft_ids.numpy()
        self._width = context.config.tree_width or _WIDTH
        self._states: dict[int, tuple[int, States]] = {}
        self._drafts: dict[int, dict[Path, _Offer]] = {}
        shape = (_KINDS, self._heads.count, self._width)
        stated = {_ARGMAX: head.accept_by_rank}
        self._accuracies: TenantStore[HeadAccuracy] = TenantStore(partial(HeadAccuracy, *shape, stated))
        self._failures = Failures(self.name)
        self.wants = Wants(hidden_layers=head.feature_layers)
        self.accept_by_depth = head.accept_by_depth
        self.deepest = self._heads.count

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        limits = {view.request_id: Limits.of(view, budget) for view in views}
        asked = [view for view in views if self._knows(view) and limits[view.request_id].nodes]
        trees: dict[int, DraftTree] = {}
        if asked:
            states = np.concatenate([self._states[view.request_id][1] for view in asked])
            logits = self._heads(self._features.of(states))
            guesses = Guesses.of(logits.flatten(0, 1), self._columns, self._top_k, CANDIDATES)
            for i, view in enumerate(asked):
                of_heads = [guesses[row : row + 1] for row in range(i, len(guesses), len(asked))]
                trees[view.request_id] = self._tree(view, of_heads, limits[view.request_id])
        return [trees.get(view.request_id, DraftTree()) for view in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            draft = self._drafts.pop(observation.view.request_id, None)
            if draft is not None:
                self._learn(observation, draft)
            if observation.path and not observation.finished:
                row = len(observation.context) + observation.path[-1]
                position = observation.start + len(observation.context) + len(observation.path) - 1
                state = self._features.states(observation, [row])
                self._states[observation.view.request_id] = (position, state)

    def take_failures(self) -> Mapping[str, frozenset[int]]:
        return self._failures.take()

    def pause(self, view: SequenceView) -> None:
        """Forget the state: the target goes on, or through the text again, before the next draft."""
        self._states.pop(view.request_id, None)
        self._drafts.pop(view.request_id, None)

    def close(self, view: SequenceView) -> None:
        self._states.pop(view.request_id, None)
        self._drafts.pop(view.request_id, None)

    def _knows(self, view: SequenceView) -> bool:
        """Whether the state before the root is at hand."""
        known = self._states.get(view.request_id)
        return known is not None and known[0] == len(view.tokens) - 2

    def _tree(self, view: SequenceView, of_heads: Sequence[Guesses], limits: Limits) -> DraftTree:
        """One request's tree. Logits that cannot be used cost that request its draft, and no other."""
        draft = self._drafts[view.request_id] = {}
        try:
            for guesses in of_heads:
                guesses.check()
        except NonFiniteLogitsError as error:
            self._failures.add(view.request_id, error)
            return DraftTree()
        at_depth: dict[int, _Offer] = {}

        def expand(path: Path) -> Iterator[tuple[int, float, Path]]:
            depth = len(path)
            if depth == len(of_heads):
                return
            if view.sampling.candidates.reads_paths or depth not in at_depth:
                at_depth[depth] = self._offer(view, of_heads[depth], path)
            offer = draft[path] = at_depth[depth]
            for token, score in offer.rated:
                yield token, score, (*path, token)

        root: Path = ()
        return grow(root, expand, limits, width=self._width)

    def _offer(self, view: SequenceView, guesses: Guesses, path: Path) -> _Offer:
        """A head's candidates after ``path``, whose length is the head's number."""
        paths = np.array([path], dtype=np.int64).reshape(1, -1)
        tokens, scores = (found[0] for found in children_of(view, guesses, paths, self._width))
        tokens, scores = tokens[scores > 0], scores[scores > 0]
        chances = self._accuracies.get(view.tenant).chances(_kind(view), len(path), scores)
        order = np.argsort(-chances, kind="stable")
        return _Offer(tokens, scores, list(zip(tokens[order].tolist(), chances[order].tolist(), strict=True)))

    def _learn(self, observation: Observation, draft: Mapping[Path, _Offer]) -> None:
        """Which candidates were right, as far as what was drafted went along with the text."""
        view = observation.view
        accuracy = self._accuracies.get(view.tenant)
        path: Path = ()
        for right in observation.committed:
            if path not in draft:
                break
            offer = draft[path]
            accuracy.record(_kind(view), len(path), offer.scores, offer.tokens == right)
            path = (*path, right)


def _kind(view: SequenceView) -> int:
    if view.sampling.params.greedy:
        return _ARGMAX if view.sampling.is_argmax else _GREEDY
    return _SHARED_NOISE if view.noise_stream == Stream.TARGET else _OWN_NOISE
