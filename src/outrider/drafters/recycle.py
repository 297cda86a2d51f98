"""Token Recycling: the target's own top candidates after each token, kept and laid out as a tree.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (2024).
Every verified row, accepted or not, says what the target thinks may follow that row's token; plain decoding throws
that away.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView, Wants
from outrider.drafters.growth import Limits, grow
from outrider.drafters.tenants import TenantStore

CANDIDATES = 8
MAX_TOKENS = 8192
"""Tokens whose candidates are kept per tenant: about 6 MB."""

Candidates = tuple[tuple[int, ...], tuple[float, ...]]
"""Token ids and their probabilities, best first."""


class RecycleDrafter(Drafter):
    """Lays the candidates out best path first. Tokens never verified fall back to the prompt's own bigrams."""

    name = "recycle"
    wants = Wants(top_k=CANDIDATES)
    default_tokens = 16

    def __init__(self, context: DrafterContext) -> None:
        self._width = context.config.tree_width
        self._tables: TenantStore[dict[int, Candidates]] = TenantStore(dict)
        self._bigrams: dict[int, dict[int, Candidates]] = {}

    def open(self, view: SequenceView) -> None:
        self._bigrams[view.request_id] = _bigrams(view.tokens)

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [self._propose(view, budget) for view in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            if observation.top_ids is not None and observation.top_logprobs is not None:
                self._learn(
                    observation, observation.top_ids.tolist(), observation.top_logprobs.clamp(max=0).exp().tolist()
                )

    def close(self, view: SequenceView) -> None:
        self._bigrams.pop(view.request_id, None)

    def _propose(self, view: SequenceView, budget: Budget) -> DraftTree:
        table = self._tables.get(view.tenant)
        bigrams = self._bigrams.get(view.request_id, {})

        def expand(token: int) -> list[tuple[int, float, int]]:
            found = table.get(token) or bigrams.get(token)
            return [(follower, p, follower) for follower, p in zip(*found, strict=True)] if found else []

        return grow(view.tokens[-1], expand, Limits.of(view, budget), width=self._width)

    def _learn(self, observation: Observation, ids: list[list[int]], probabilities: list[list[float]]) -> None:
        table = self._tables.get(observation.view.tenant)
        accepted = set(observation.path)
        # A token may occur in several rows: what was said in the accepted context comes last, and stays.
        for row in (*(row for row in range(len(ids)) if row not in accepted), *observation.path):
            token = observation.rows[row]
            table.pop(token, None)
            table[token] = (tuple(ids[row]), tuple(probabilities[row]))
        while len(table) > MAX_TOKENS:
            del table[next(iter(table))]


def _bigrams(tokens: Sequence[int]) -> dict[int, Candidates]:
    """For each token what followed it, most frequent first; one occurrence counts as unseen."""
    followers: dict[int, Counter[int]] = {}
    for token, follower in itertools.pairwise(tokens):
        followers.setdefault(token, Counter())[follower] += 1
    table: dict[int, Candidates] = {}
    for token, counts in followers.items():
        best = counts.most_common(CANDIDATES)
        total = counts.total() + 1
        table[token] = (tuple(t for t, _ in best), tuple(n / total for _, n in best))
    return table
