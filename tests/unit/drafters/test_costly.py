"""A cascade's member that runs a model: when it is asked, what it is told, and what its books say."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, Observation, SequenceView, Wants
from outrider.drafters.cascade import Cascade
from outrider.drafters.costly import reach_by_depth
from tests.unit.drafters.simulation import commit, make_view

LAYER = 2
SECONDS = 1e-3
"""What the costly member takes for a level."""


class Lookup(Drafter):
    """Knows the next token with the chance that it says."""

    name = "lookup"

    def __init__(self, chance: float = 0.0) -> None:
        self._chance = chance

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        tree = DraftTree.chain([5], [self._chance]) if self._chance else DraftTree()
        return [tree] * len(views)


class Costly(Drafter):
    """Proposes a chain of as many tokens as it may, at a millisecond each."""

    name = "costly"
    needs_model = True
    wants = Wants(hidden_layers=(LAYER,))

    def __init__(self, accept_by_depth: Sequence[float] = ()) -> None:
        self.accept_by_depth = accept_by_depth
        self.asked: list[tuple[str, int]] = []
        self.told = 0
        self.paused: list[str] = []

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        self.asked += [(view.tenant, budget.depth) for view in views]
        time.sleep(SECONDS * budget.depth)
        return [DraftTree.chain(list(range(5, 5 + budget.depth)), [0.5] * budget.depth)] * len(views)

    def observe(self, observations: Sequence[Observation]) -> None:
        assert all(LAYER in observation.hidden for observation in observations)
        self.told += len(observations)

    def pause(self, view: SequenceView) -> None:
        self.paused.append(view.tenant)


def budget(plain: float, row: float = 0.0, depth: int = 2) -> Budget:
    """A round takes ``plain`` levels of the costly member, and each of its nodes ``row``."""
    return Budget(depth, depth, lambda nodes: SECONDS * (plain + row * nodes))


def play(cascade: Cascade, view: SequenceView, limits: Budget, right: int, rounds: int = 1) -> list[DraftTree]:
    """Rounds of one request that each commit the first ``right`` of the tokens 5, 6, …. Returns what was drafted."""
    trees: list[DraftTree] = []
    for _ in range(rounds):
        tree = cascade.propose([view], limits)[0]
        committed = [*range(5, 5 + right), 3]
        hidden = {layer: torch.zeros(1 + len(tree), 4) for layer in cascade.wants.hidden_layers}
        commit(view, committed)
        cascade.observe([Observation(view, committed, [3, *tree.tokens], [0], tree, hidden=hidden)])
        trees.append(tree)
    return trees


def view_of(tenant: str = "a") -> SequenceView:
    return make_view([3], tenant=tenant, room=10_000)


def test_one_that_pays_is_asked_in_every_round() -> None:
    costly = Costly()
    trees = play(Cascade([Lookup(), costly]), view_of(), budget(plain=50), right=2, rounds=60)
    assert len(costly.asked) == 60
    assert all(len(tree) == 2 for tree in trees)
    assert costly.told == 60
    assert not costly.paused


def test_one_that_does_not_pay_is_asked_and_told_less_and_less() -> None:
    costly, view = Costly(), view_of()
    cascade = Cascade([Lookup(), costly])
    play(cascade, view, budget(plain=2), right=0, rounds=150)
    assert costly.paused
    assert cascade.wants == Wants(), "the target's hidden states are no longer copied for it"
    asked, told = len(costly.asked), costly.told
    assert asked < 20
    assert told < 60
    play(cascade, view, budget(plain=2), right=0, rounds=400)
    assert len(costly.asked) - asked < 12
    assert costly.told > told, "it gets a trial now and then"


def test_one_that_begins_to_pay_is_found_out() -> None:
    costly, view = Costly(), view_of()
    cascade = Cascade([Lookup(), costly])
    play(cascade, view, budget(plain=10), right=0, rounds=150)
    asked = len(costly.asked)
    assert asked < 40
    play(cascade, view, budget(plain=10), right=2, rounds=1200)
    assert len(costly.asked) - asked > 300
    assert cascade.wants.hidden_layers == (LAYER,)


def test_what_the_others_know_is_not_bought_again() -> None:
    """Both propose the same token; the lookup is free, and all that the model adds is its second token, never right."""
    costly = Costly()
    cascade = Cascade([Lookup(0.9), costly])
    view = view_of()
    play(cascade, view, budget(plain=10, depth=1), right=1, rounds=40)
    assert len(costly.asked) < 20
    alone = Costly()
    play(Cascade([Lookup(), alone]), view_of(), budget(plain=10, depth=1), right=1, rounds=40)
    assert len(alone.asked) == 40


def test_what_was_measured_in_training_counts_from_the_first_round() -> None:
    """Once its price is known, another tenant is not drafted for in vain first."""
    for chances, least, most in (((0.05, 0.05), 0, 1), ((0.9, 0.9), 12, 12)):
        costly = Costly(chances)
        cascade = Cascade([Lookup(), costly])
        play(cascade, view_of("a"), budget(plain=4), right=0, rounds=12)
        costly.asked.clear()
        play(cascade, view_of("b"), budget(plain=4), right=2 if least else 0, rounds=12)
        assert least <= len(costly.asked) <= most


def test_a_tenant_learns_nothing_from_another() -> None:
    costly = Costly()
    cascade = Cascade([Lookup(), costly])
    play(cascade, view_of("a"), budget(plain=4), right=0, rounds=60)
    costly.asked.clear()
    play(cascade, view_of("b"), budget(plain=4), right=2, rounds=3)
    assert costly.asked[0] == ("b", 2)


def test_without_prices_it_is_asked_in_full() -> None:
    costly = Costly()
    trees = play(Cascade([Lookup(0.9), costly]), view_of(), Budget(4, 4), right=0, rounds=150)
    assert costly.asked == [("a", 4)] * 150
    assert costly.told == 150
    assert all(len(tree) == 4 for tree in trees)


@pytest.mark.parametrize(
    ("tree", "reach"),
    [
        (DraftTree(), []),
        (DraftTree([5, 6, 7], [ROOT, ROOT, 0], [0.5, 0.25, 0.5]), [0.75, 0.25]),
        (DraftTree([5, 6], [ROOT, ROOT], [0.75, 0.75]), [1.0]),
    ],
)
def test_reach_by_depth(tree: DraftTree, reach: list[float]) -> None:
    assert reach_by_depth(tree) == reach
