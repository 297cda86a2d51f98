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
    """Counts, for each drafter, the rounds in which it drafted and those in which at least one of its tokens was kept.

    By rounds and not by tokens: a wide tree has a low acceptance rate by design, and is still worth its while.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def observe(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Learn from one verified tree, whose sources are filled in."""
        accepted = {source for node in path for source in tree.sources[node]}
        for source in {source for sources in tree.sources for source in sources}:
            record = self._records.setdefault(source, _Record())
            record.rounds += 1
            record.useful += source in accepted
            if record.rounds >= _ENOUGH_ROUNDS and not record.reported:
                self._report(source, record)

    def _report(self, source: str, record: _Record) -> None:
        if record.useful > _HOPELESS * record.rounds:
            return
        record.reported = True
        log.warning(
            "drafter %r had a token accepted in only %d of %d rounds: its weights may not belong to this target, or "
            "may have been loaded with the wrong quantisation, scale or layers; the text is not affected, the speed is",
            source,
            record.useful,
            record.rounds,
        )
