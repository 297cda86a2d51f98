"""No drafting: every round is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, SequenceView


class NoDrafter(Drafter):
    """Proposes nothing. The baseline that every other drafter is measured against."""

    name = "none"
    default_tokens = 0

    def __init__(self, context: DrafterContext) -> None:
        """``context`` is taken as every drafter takes it; nothing of it is needed."""

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [DraftTree() for _ in views]
