"""Token Recycling: the target's own top candidates after each token, kept and laid out as a tree.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (2024).
Every verified row, accepted or not, says what the target thinks may follow that row's token; plain decoding throws
that away.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from outrider.core.tenants import TenantStore
from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView, Wants
from outrider.drafters.growth import Limits, grow

CANDIDATES = 8
RELIABILITY = 0.5
"""How often the candidates of one context hold in the next: what their probabilities are scaled by to make scores."""
MAX_TOKENS = 8192
"""Tokens whose candidates are kept per tenant: about 6 MB."""

Candidates = tuple[Sequence[int], Sequence[float]]
"""Token ids and their scores, best first."""


class RecycleDrafter(Drafter):
    """Lays the candidates out best path first. Tokens never verified fall back to the prompt's own bigrams."""

    name = "recycle"
    wants = Wants(top_k=CANDIDATES)
    default_tokens = 16

    def __init__(self, context: DrafterContext) -> None:
        self._width = context.config.tree_width
        self._tables: TenantStore[dict[int, Candidates]] = TenantStore(dict)
        self._followers: dict[int, dict[int, list[int]]] = {}

    def open(self, view: SequenceView) -> None:
        self._followers[view.request_id] = _followers(view.tokens)

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [self._propose(view, budget) for view in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            if observation.top_ids is not None and observation.top_logprobs is not None:
                scores = np.exp(np.minimum(observation.top_logprobs.numpy(), 0)) * RELIABILITY
                self._learn(observation, observation.top_ids.tolist(), scores.tolist())

    def close(self, view: SequenceView) -> None:
        self._followers.pop(view.request_id, None)

    def _propose(self, view: SequenceView, budget: Budget) -> DraftTree:
        table = self._tables.get(view.tenant)
        followers = self._followers.get(view.request_id, {})

        def expand(token: int) -> Iterable[tuple[int, float, int]]:
            tokens, scores = table.get(token) or _bigrams(followers.get(token))
            return zip(tokens, scores, tokens, strict=True)

        return grow(view.tokens[-1], expand, Limits.of(view, budget), width=self._width)

    def _learn(self, observation: Observation, ids: list[list[int]], scores: list[list[float]]) -> None:
        table = self._tables.get(observation.view.tenant)
        accepted = set(observation.path)
        # A token may occur in several rows: what was said in the accepted context comes last, and stays.
        for row in (*(row for row in range(len(ids)) if row not in accepted), *observation.path):
            token = observation.rows[row]
            table.pop(token, None)
            table[token] = ids[row], scores[row]
        while len(table) > MAX_TOKENS:
            del table[next(iter(table))]


def _followers(tokens: Sequence[int]) -> dict[int, list[int]]:
    """For each token what followed it, in order. A long prompt's are gathered while other requests wait, so no more is
    done here than must be.
    """
    followers: dict[int, list[int]] = {}
    for token, follower in itertools.pairwise(tokens):
        followers.setdefault(token, []).append(follower)
    return followers


def _bigrams(followers: Sequence[int] | None) -> Candidates:
    """What followed a token, most frequent first; one occurrence counts as unseen."""
    if not followers:
        return (), ()
    best = Counter(followers).most_common(CANDIDATES)
    return tuple(token for token, _ in best), tuple(count / (len(followers) + 1) for _, count in best)
