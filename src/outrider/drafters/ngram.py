"""Prompt lookup: what followed the last few tokens when they were seen before in this request.

Saxena, "Prompt Lookup Decoding" (2023). Summaries, edits and code repeat their own context, and a copy costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, SequenceView
from outrider.drafters.growth import Limits, grow

_EARLIER_MATCHES = 16
"""Matches that are looked at for a tree's branches."""

Copy = tuple[int, int, int]
"""(position to copy next, position where the copy began, tokens matched so far)."""


class NgramIndex:
    """Where each n-gram of a growing text was followed by something; every lookup is a few dictionary reads."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._latest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        self._earlier: dict[int, list[int]] = {n: [] for n in self._lengths}
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index what is new in ``tokens``, the whole text so far.

        An n-gram is entered only once the token after it is known. That keeps the text's own end, which every lookup
        asks for, from matching itself.
        """
        for follower in range(self._indexed, len(tokens)):
            for n in self._lengths:
                if n > follower:
                    break
                gram = tuple(tokens[follower - n : follower])
                latest = self._latest[n]
                self._earlier[n].append(latest.get(gram, -1))
                latest[gram] = follower
        self._indexed = len(tokens)

    def matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(follower's position, n) for earlier occurrences of the last n tokens: longest n first, latest first."""
        for n in reversed(self._lengths):
            if n > len(tokens):
                continue
            at = self._latest[n].get(tuple(tokens[-n:]), -1)
            while at >= 0:
                yield at, n
                # Followers are entered from position n on, one after the other.
                at = self._earlier[n][at - n]


class NgramDrafter(Drafter):
    """Copies on from the latest match of the longest n-gram; with ``tree_width`` > 1, earlier matches are branches."""

    name = "ngram"
    default_tokens = 8

    def __init__(self, context: DrafterContext) -> None:
        self._config = context.config
        self._width = context.config.tree_width or 1
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [self._propose(view, budget) for view in views]

    def close(self, view: SequenceView) -> None:
        self._indices.pop(view.request_id, None)

    def _propose(self, view: SequenceView, budget: Budget) -> DraftTree:
        index = self._indices.get(view.request_id)
        if index is None:
            index = NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
            self._indices[view.request_id] = index
        index.extend(view.tokens)
        copies = self._copies(index, view.tokens)
        return grow(copies, lambda state: _continue(state, view.tokens), Limits.of(view, budget), width=self._width)

    def _copies(self, index: NgramIndex, tokens: Sequence[int]) -> tuple[Copy, ...]:
        wanted = 1 if self._width == 1 else _EARLIER_MATCHES
        copies: dict[int, Copy] = {}
        for at, n in index.matches(tokens):
            copies.setdefault(at, (at, at, n))
            if len(copies) == wanted:
                break
        return tuple(copies.values())


def _continue(copies: tuple[Copy, ...], tokens: Sequence[int]) -> list[tuple[int, float, tuple[Copy, ...]]]:
    """What each copy reads next, grouped by token; the better match weighs twice as much as the next one.

    A copy that reaches the end of the text goes back to where it began: the text is periodic there (the match overlaps
    its own continuation), and the period is what comes next.
    """
    groups: dict[int, list[Copy]] = {}
    weights: dict[int, float] = {}
    weight, total = 1.0, 0.0
    for at, start, length in copies:
        token = tokens[at]
        after = at + 1 if at + 1 < len(tokens) else start
        groups.setdefault(token, []).append((after, start, length + 1))
        weights[token] = weights.get(token, 0.0) + weight
        total += weight
        weight /= 2
    candidates = [
        (token, weights[token] / total * _confidence(group[0][2] - 1), tuple(group)) for token, group in groups.items()
    ]
    candidates.sort(key=lambda candidate: -candidate[1])
    return candidates


def _confidence(matched: int) -> float:
    """Estimated chance that the copy goes on after ``matched`` tokens: rises with the length of the match."""
    return matched / (matched + 1)
