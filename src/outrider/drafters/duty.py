"""When a drafter that reads hidden states follows the rounds and when it rests: following takes time, drafts or not."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafters.health import AcceptanceWatch

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


def watch_for_vain_drafts() -> AcceptanceWatch:
    """Says once that a drafter is never right: it would rest, and nobody would ever know why."""
    return AcceptanceWatch(_HOPELESS_AFTER, ", and will rarely be asked")
