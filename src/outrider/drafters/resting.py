"""A drafter alone that reads hidden states: where its drafts do not pay, it is not told of the rounds either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.core.tenants import TenantStore
from outrider.core.tree import DraftTree
from outrider.drafters.base import Drafter, Wants
from outrider.drafters.calibration import follow
from outrider.drafters.duty import Duty, watch_for_vain_drafts

if TYPE_CHECKING:
    from outrider.drafters.base import Budget, Observation, SequenceView


@dataclass
class _Tenant:
    """asked, before: whether a draft was asked for in this round, and in the one before it."""

    duty: Duty = field(default_factory=Duty)
    asked: bool = False
    before: bool = False

    def count(self) -> bool:
        """One more round. Returns whether the drafter has come to rest.

        A draft that is asked for twice running is meant in earnest. One that is in debt is asked now and then, to see
        whether it has improved.
        """
        was_awake = self.duty.awake
        self.duty.count(self.asked and self.before)
        self.asked, self.before = False, self.asked
        return was_awake and not self.duty.awake


class Resting(Drafter):
    """Follows a tenant's requests as long as drafts are asked for, and beyond that for a trial now and then.

    What a `CostlyMember` is to a cascade: but that whoever asks decides by the price whether a draft pays. Without a
    price it never rests.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.default_tokens = drafter.default_tokens
        self.needs_model = drafter.needs_model
        self.accept_by_depth = drafter.accept_by_depth
        self.deepest = drafter.deepest
        self.minds_price = drafter.minds_price
        self.wants = drafter.wants
        self._tenants: TenantStore[_Tenant] = TenantStore(_Tenant)
        self._views: dict[int, SequenceView] = {}
        self._drafts: dict[int, DraftTree] = {}
        self._watch = watch_for_vain_drafts()
        self._priced = False

    def open(self, view: SequenceView) -> None:
        self._views[view.request_id] = view
        self._want()
        if self._is_awake(view):
            self.drafter.open(view)

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        self._priced = budget.price is not None
        awake = [view for view in views if self._is_awake(view)]
        for view in awake:
            self._tenants.get(view.tenant).asked = True
        trees = self.drafter.propose(awake, budget) if awake else []
        found = dict(zip((view.request_id for view in awake), trees, strict=True))
        self._drafts |= found
        return [found.get(view.request_id, DraftTree()) for view in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            draft = self._drafts.pop(observation.view.request_id, None)
            if self._priced and draft is not None and draft.tokens:
                self._watch.count(self.drafter.name, useful=bool(follow(draft, observation.committed)))
        layers = self.drafter.wants.hidden_layers
        told = [o for o in observations if self._is_awake(o.view) and all(layer in o.hidden for layer in layers)]
        try:
            if told:
                self.drafter.observe(told)
        finally:
            self._count(observations)
            self._want()

    def take_failures(self) -> Mapping[str, frozenset[int]]:
        return self.drafter.take_failures()

    def pause(self, view: SequenceView) -> None:
        self.drafter.pause(view)

    def close(self, view: SequenceView) -> None:
        self._views.pop(view.request_id, None)
        self._drafts.pop(view.request_id, None)
        self.drafter.close(view)

    def _is_awake(self, view: SequenceView) -> bool:
        return not self._priced or self._tenants.get(view.tenant).duty.awake

    def _count(self, observations: Sequence[Observation]) -> None:
        """Count the round for each tenant that decodes; let go of the requests of those that it follows no longer."""
        if not self._priced:
            return
        # A chunk of a prompt is no round: there was nothing to draft for.
        tenants = dict.fromkeys(observation.view.tenant for observation in observations if observation.rows)
        gone = {tenant for tenant in tenants if self._tenants.get(tenant).count()}
        for view in self._views.values():
            if view.tenant in gone:
                self.drafter.pause(view)

    def _want(self) -> None:
        """Want what the drafter wants, if it follows any request."""
        self.wants = self.drafter.wants if any(map(self._is_awake, self._views.values())) else Wants()
