"""When a drafter that reads hidden states follows the rounds and when it rests: following takes time, drafts or not."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_log = logging.getLogger(__name__)

_FIRST_TRIAL = 6
_TRIAL = 24
_REST = 96
_LONGEST_REST = 768
_HOPELESS_AFTER = 16
"""Drafts of which not one began with the right token. A drafter that fits its target has that in every second."""


@dataclass
class Duty:
    """Whether the drafter follows what a tenant's requests do, which costs time in every round, drafts or not.

    left: rounds until that is decided anew. rest: rounds of the next rest. needed: it was asked in earnest since then.
    """

    awake: bool = True
    left: int = _FIRST_TRIAL
    rest: int = _REST
    needed: bool = False

    def count(self, needed: bool) -> None:
        """One more round."""
        self.left -= 1
        self.needed |= needed
        if self.left:
            return
        if self.awake and not self.needed:
            self.awake, self.left, self.rest = False, self.rest, min(2 * self.rest, _LONGEST_REST)
            return
        if self.needed:
            self.rest = _REST
        self.awake, self.left, self.needed = True, _TRIAL, False


@dataclass
class Usefulness:
    """Says once if a drafter is never right: it would rest, and nobody would ever know why."""

    name: str
    drafts: int = 0
    useful: int = 0

    def count(self, useful: bool) -> None:
        """One more draft. useful: it began with the right token."""
        self.drafts += 1
        self.useful += useful
        if self.drafts == _HOPELESS_AFTER and not self.useful:
            _log.warning(
                "drafter %r has not been right once in %d drafts, and will rarely be asked: its weights may not belong "
                "to this target; the text is not affected, the speed is",
                self.name,
                self.drafts,
            )
