"""The conformance suite notices what it is there to notice: one broken drafter for each check."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from outrider.core.errors import DraftError
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, Observation, SequenceView
from tests.support.fakes import EOS, VOCAB
from tests.unit.drafters import conformance


class Bigrams(Drafter):
    """Drafts one token, the last one's latest follower; correct, and the base of the broken ones."""

    name = "bigrams"

    def __init__(self) -> None:
        self.followers: dict[object, dict[int, int]] = {}

    def key(self, view: SequenceView) -> object:
        return view.request_id

    def open(self, view: SequenceView) -> None:
        self.followers[self.key(view)] = {}

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [self.tree(view, budget) for view in views]

    def tree(self, view: SequenceView, budget: Budget) -> DraftTree:
        table = self.followers.setdefault(self.key(view), {})
        table.update(zip(view.tokens, view.tokens[1:], strict=False))
        token = table.get(view.tokens[-1])
        if token is None or not min(budget.nodes, budget.depth, view.room):
            return DraftTree()
        return DraftTree.chain([token])

    def close(self, view: SequenceView) -> None:
        self.followers.pop(self.key(view), None)


class Shared(Bigrams):
    def key(self, view: SequenceView) -> object:
        return None

    def close(self, view: SequenceView) -> None: ...


class Leaking(Bigrams):
    def close(self, view: SequenceView) -> None: ...


class Boundless(Bigrams):
    def tree(self, view: SequenceView, budget: Budget) -> DraftTree:
        return DraftTree.chain([5, 6, 7])


class Twin(Bigrams):
    def tree(self, view: SequenceView, budget: Budget) -> DraftTree:
        room = min(budget.nodes, budget.depth, view.room)
        return DraftTree([5, 5], [ROOT, ROOT], [0.5, 0.5]) if room > 1 else DraftTree()


class Eager(Bigrams):
    def tree(self, view: SequenceView, budget: Budget) -> DraftTree:
        return DraftTree.chain([EOS, 5]) if min(budget.nodes, budget.depth, view.room) > 1 else DraftTree()


class Meddling(Bigrams):
    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            observation.view.tokens.append(5)


class Forgetful(Bigrams):
    """Needs every `open`."""

    def tree(self, view: SequenceView, budget: Budget) -> DraftTree:
        self.followers[self.key(view)]
        return super().tree(view, budget)


class Counting(Bigrams):
    """Depends on how often it was asked, and on who else is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def tree(self, view: SequenceView, budget: Budget) -> DraftTree:
        self.asked += 1
        return DraftTree.chain([3 + self.asked % (VOCAB - 3)]) if min(budget.nodes, budget.depth) else DraftTree()


class Fickle(Bigrams):
    """Differs from one instance to the next."""

    def tree(self, view: SequenceView, budget: Budget) -> DraftTree:
        return DraftTree.chain([3 + id(self) // 16 % 29], [id(self) % 997 / 1000])


def _greedy(check: Callable[..., None], *arguments: object) -> Callable[[conformance.Build], None]:
    return lambda build: check(build, *arguments, conformance.REGIMES[0])


CHECKS: dict[str, Callable[[conformance.Build], None]] = {
    "valid": _greedy(conformance.trees_are_valid, None),
    "ends": _greedy(conformance.end_tokens_are_leaves),
    "room": conformance.nothing_without_room,
    "prompts": conformance.any_prompt_will_do,
    "twice": _greedy(conformance.asking_twice_is_harmless),
    "repeat": _greedy(conformance.runs_repeat),
    "views": conformance.views_are_left_alone,
    "tenants": conformance.tenants_are_strangers,
    "batches": _greedy(conformance.batches_change_nothing),
    "memory": conformance.memory_is_freed,
}
BROKEN = [
    ("valid", Twin),
    ("valid", Boundless),
    ("ends", Eager),
    ("room", Boundless),
    ("prompts", Forgetful),
    ("twice", Counting),
    ("repeat", Fickle),
    ("views", Meddling),
    ("tenants", Shared),
    ("batches", Counting),
    ("memory", Leaking),
]


@pytest.mark.parametrize("check", CHECKS)
def test_a_correct_drafter_passes(check: str) -> None:
    CHECKS[check](lambda **_: Bigrams())


@pytest.mark.parametrize(("check", "drafter"), BROKEN)
def test_a_broken_drafter_fails(check: str, drafter: type[Bigrams]) -> None:
    kept: list[Drafter] = []

    def build(**_: object) -> Drafter:
        # Instances are kept alive, so that no two of them have the same id.
        kept.append(drafter())
        return kept[-1]

    with pytest.raises((AssertionError, DraftError, KeyError)):
        CHECKS[check](build)


def test_every_check_has_a_drafter_that_fails_it() -> None:
    assert {check for check, _ in BROKEN} == set(CHECKS)
