"""The window of lookahead decoding: trajectories of a Jacobi iteration over the positions after the root."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence


class Window:
    """``width`` trajectories, each of them the last ``length`` guesses made one iteration and one position apart.

    Trajectory i starts i positions after the root. Its first token is the oldest guess; the first tokens of all of
    them, one after the other, are the context in which the later ones of each were, and are, guessed. A forward pass
    over `paths` guesses one more token for every trajectory, which then lets go of its first and so is one position
    further on: where it belongs if one token was committed.
    """

    def __init__(self, width: int, length: int, text: Sequence[int], end_ids: frozenset[int]) -> None:
        """text: what the first guesses are drawn from. end_ids: tokens that no guess may be, since nothing follows."""
        self._width = width
        self._length = length
        self._end_ids = end_ids
        self._random = random.Random(0)
        self._trajectories: list[list[int]] = []
        self.shift(text, 0)

    def paths(self) -> list[tuple[int, ...]]:
        """For each trajectory the tokens below the root whose last row is to guess its next one.

        The root stands in for the first token of the first trajectory.
        """
        context: list[int] = []
        paths: list[tuple[int, ...]] = []
        for number, trajectory in enumerate(self._trajectories):
            if number:
                context.append(trajectory[0])
            paths.append((*context, *trajectory[1:]))
        return paths

    def advance(self, root: int, guesses: Sequence[int]) -> list[tuple[int, ...]]:
        """Move every trajectory on by what the target has guessed. Returns the n-grams of ``length`` + 1 tokens."""
        self._trajectories[0][0] = root
        ngrams = [(*old, guess) for old, guess in zip(self._trajectories, guesses, strict=True)]
        self._trajectories = [list(ngram[1:]) for ngram in ngrams]
        return ngrams

    def shift(self, text: Sequence[int], positions: int) -> None:
        """Let go of trajectories that the text, ``positions`` tokens longer than they expect, has overtaken, and start
        as many at the far end. Fresh ones go on where the last one is, with tokens of the text: what follows there is
        better than nothing, and they are overwritten within ``length`` rounds.
        """
        del self._trajectories[:positions]
        for trajectory in self._trajectories:
            trajectory[:] = [self._any(text) if token in self._end_ids else token for token in trajectory]
        while len(self._trajectories) < self._width:
            known = self._trajectories[-1][1:] if self._trajectories else []
            self._trajectories.append([*known, *(self._any(text) for _ in range(self._length - len(known)))])

    def _any(self, text: Sequence[int]) -> int:
        """A token of the text that may be followed by others, or just any such token."""
        token = self._random.choice(text)
        return token if token not in self._end_ids else next(t for t in itertools.count() if t not in self._end_ids)
