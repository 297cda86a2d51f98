"""One request's place in its grammar, and the mask that follows from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outrider.core.errors import NoTokenLeftError
from outrider.core.mask import TokenMask
from outrider.grammar.vocabulary import xgrammar

if TYPE_CHECKING:
    from outrider.grammar.vocabulary import Vocabulary


STEP = 0.01
OVERTIME = 1.0
"""Seconds of processor time that a grammar may take beyond `STEP` for each mask or token, added up over a request. The
last resort against what `outrider.grammar.ambiguity` does not see: where a text can be read in many ways, xgrammar's
time grows with a power of its length, and every request of the batch waits for it."""


class GrammarMask(TokenMask):
    """A pushdown automaton that stands after the committed tokens, and walks down a node's path and back on demand.

    Neighbouring nodes are asked about one after the other, so it goes back only as far as two paths differ.
    """

    def __init__(self, compiled: Any, vocabulary: Vocabulary, stop_token_ids: Sequence[int] = ()) -> None:
        """``compiled``: what `Compiler.compile` returned. ``stop_token_ids``: the request's own.

        A stop token that writes no text may end the output like the model's own, once the grammar is complete. One that
        writes text is text like any other, and cuts the output short wherever the grammar lets it come.
        """
        self._ends = vocabulary.end_ids | (vocabulary.control & frozenset(stop_token_ids))
        self._never = vocabulary.control - self._ends
        self._matcher = xgrammar().GrammarMatcher(compiled, override_stop_tokens=sorted(self._ends))
        self._size = vocabulary.size
        self._words = np.empty((1, -(-vocabulary.size // 32)), dtype=np.int32)
        self._path: list[int] = []
        self._overtime = 0.0

    def forbidden(self, path: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """As in `TokenMask`. Raises NoTokenLeftError, from now on, if its `OVERTIME` is used up."""
        if self._overtime > OVERTIME:
            raise NoTokenLeftError(
                f"its grammar took {self._overtime:.1f} s more than tokens usually do: unnest its repetitions, or "
                "simplify it"
            )
        began = time.thread_time()
        ruled_out = self._ruled_out(path)
        self._count(began)
        return ruled_out

    def _ruled_out(self, path: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        if not self._walk_to(path) or self._matcher.is_terminated():
            return None
        if not self._matcher.fill_next_token_bitmask(self._words):
            return None
        ruled_out = np.unpackbits(~self._words.view(np.uint8)[0], count=self._size, bitorder="little")
        return ruled_out.view(np.bool_)

    def commit(self, token: int) -> None:
        """Raises RuntimeError if the grammar forbids the token, which no acceptance rule lets happen."""
        began = time.thread_time()
        allowed = self._walk_to([token])
        self._count(began)
        if not allowed:
            raise RuntimeError(f"token {token} was committed against the request's grammar")
        self._path.clear()

    def _count(self, began: float) -> None:
        self._overtime += max(time.thread_time() - began - STEP, 0.0)

    def _walk_to(self, path: Sequence[int]) -> bool:
        """Stand after ``path``, or as far down it as the grammar goes; whether the whole path is allowed."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        for token in path[shared:]:
            # xgrammar complains on standard error when it is given these.
            if token in self._never or self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._path.append(token)
        return True
