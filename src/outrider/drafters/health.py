"""Notices a drafter that drafts in vain, and says so once, by name, with the likely cause."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.core.tree import DraftTree

log = logging.getLogger(__name__)

_ENOUGH_ROUNDS = 200
_HOPELESS = 0.02


@dataclass
class _Record:
    rounds: int = 0
    useful: int = 0
    reported: bool = False


class AcceptanceWatch:
    """Counts, for each drafter, the rounds in which it drafted and those in which at least one of its tokens was right.

    By rounds and not by tokens: a wide tree has a low acceptance rate by design, and is still worth its while.
    """

    def __init__(self, rounds: int = _ENOUGH_ROUNDS, outcome: str = "") -> None:
        """rounds: drafts that a drafter is given before anything is said of it. outcome: what is done about one that
        drafts in vain, to follow "has not been right once in 200 drafts".
        """
        self._rounds = rounds
        self._outcome = outcome
        self._records: dict[str, _Record] = {}

    def observe(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Learn from one verified tree, whose sources are filled in."""
        accepted = {source for node in path for source in tree.sources[node]}
        for source in {source for sources in tree.sources for source in sources}:
            self.count(source, useful=source in accepted)

    def count(self, source: str, *, useful: bool) -> None:
        """Learn from one draft of a drafter. useful: whether a token of it was right."""
        record = self._records.setdefault(source, _Record())
        record.rounds += 1
        record.useful += useful
        if record.rounds >= self._rounds and not record.reported and record.useful <= _HOPELESS * record.rounds:
            record.reported = True
            self._report(source, record)

    def _report(self, source: str, record: _Record) -> None:
        log.warning(
            "drafter %r %s %d drafts%s: its weights may not belong to this target, or may have been loaded with the "
            "wrong quantisation, scale or layers; the text is not affected, the speed is",
            source,
            f"was right in only {record.useful} of" if record.useful else "has not been right once in",
            record.rounds,
            self._outcome,
        )
