"""The n-grams of lookahead decoding: what the text holds, and what the target has guessed beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

MAX_FIRST_TOKENS = 4096
"""First tokens that are kept for a request; of the stalest one all n-grams go."""
MAX_TAILS = 12
"""N-grams with the same first token."""

_GUESSED = 0.8
"""What a match of an n-gram that was guessed is worth next to one of the text itself."""


class Origin(IntEnum):
    """Where an n-gram comes from; of several the least counts, since it could have been had from there alone.

    TEXT: the prompt or the answer. ROW: an n-gram of the pool that was verified, and the target's guess after it.
    BRANCH: the lookahead branch.
    """

    TEXT = 0
    ROW = 1
    BRANCH = 2


@dataclass(frozen=True)
class Continuation:
    """A token that may follow a context, and the drafter's score for it."""

    token: int
    score: float
    origin: Origin


class NgramPool:
    """N-grams of up to ``size`` tokens, by their first token, the most recent first. Bounded."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tails: dict[int, dict[tuple[int, ...], Origin]] = {}
        self._read = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what is new in ``tokens``, the whole text so far.

        Near the end of the text an n-gram grows token by token, so that what has only just been said can be copied too.
        Further up it is entered once, when it is whole: a prompt may be long.
        """
        known, length, size = self._read, len(tokens), self._size
        for end in range(max(known, 1), length):
            start = max(0, end + 1 - size)
            growing = end < known + size or end >= length - size
            for first in range(start, end if growing else start + 1):
                self.add(tokens[first : end + 1])
        self._read = length

    def add(self, ngram: Sequence[int], origin: Origin = Origin.TEXT) -> None:
        """Make an n-gram the most recent one."""
        first, tail = ngram[0], tuple(ngram[1:])
        tails = self._tails.pop(first, {})
        self._tails[first] = tails
        origin = min(tails.pop(tail, Origin.BRANCH), origin)
        if origin is Origin.TEXT:
            tails.pop(tail[:-1], None)
        tails[tail] = origin
        if len(tails) > MAX_TAILS:
            del tails[next(iter(tails))]
        if len(self._tails) > MAX_FIRST_TOKENS:
            del self._tails[next(iter(self._tails))]

    def add_guess(self, ngram: Sequence[int], origin: Origin) -> None:
        """Enter an n-gram whose last token was guessed, and all of its ends with it."""
        for first in range(len(ngram) - 1):
            self.add(ngram[first:], origin)

    def continuations(self, context: Sequence[int]) -> list[Continuation]:
        """What may follow ``context``: the longest match first, then the most recent one. Tokens are distinct."""
        found: dict[int, Continuation] = {}
        for matched, token, origin in self._matches(context):
            known = found.get(token)
            if known is None:
                score = matched / (matched + 1) * (1.0 if origin is Origin.TEXT else _GUESSED) / (1 + len(found))
                found[token] = Continuation(token, score, origin)
            elif origin < known.origin:
                found[token] = Continuation(token, known.score, origin)
        return sorted(found.values(), key=lambda continuation: -continuation.score)

    def _matches(self, context: Sequence[int]) -> Iterator[tuple[int, int, Origin]]:
        """(tokens matched, token that followed, where from)."""
        for matched in range(min(self._size - 1, len(context)), 0, -1):
            last = tuple(context[len(context) - matched + 1 :])
            for tail, origin in reversed(self._tails.get(context[-matched], {}).items()):
                if len(tail) >= matched and tail[: matched - 1] == last:
                    yield matched, tail[matched - 1], origin
