"""A cascade's member that runs a model: when it is asked, what it is told, and what its books say."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

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


class Clock:
    """Stands for the module ``time``: nothing takes time but what says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafters.costly.time", CLOCK)


class Lookup(Drafter):
    """Knows the next token with the chance that it says."""

    name = "lookup"

    def __init__(self, chance: float = 0.0) -> None:
        self._chance = chance

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        tree = DraftTree.chain([5], [self._chance]) if self._chance else DraftTree()
        return [tree] * len(views)


class Costly(Drafter):
    """Proposes a chain of as many tokens as it may, at a millisecond each, or at ``seconds``."""

    name = "costly"
    needs_model = True
    wants = Wants(hidden_layers=(LAYER,))

    def __init__(self, accept_by_depth: Sequence[float] = (), seconds: float = SECONDS) -> None:
        self.accept_by_depth = accept_by_depth
        self._seconds = seconds
        self.asked: list[tuple[str, int]] = []
        self.told = 0
        self.paused: list[str] = []

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        self.asked += [(view.tenant, budget.depth) for view in views]
        CLOCK.now += self._seconds * budget.depth
        return [DraftTree.chain(list(range(5, 5 + budget.depth)), [0.5] * budget.depth)] * len(views)

    def observe(self, observations: Sequence[Observation]) -> None:
        assert all(LAYER in observation.hidden for observation in observations)
        self.told += len(observations)

    def pause(self, view: SequenceView) -> None:
        self.paused.append(view.tenant)


def budget(plain: float, row: float = 0.0, depth: int = 2, requests: int = 1) -> Budget:
    """A round takes ``plain`` levels of the costly member, and each of its nodes ``row``."""
    return Budget(depth, depth, lambda nodes: SECONDS * (plain + row * nodes), requests)


def play(cascade: Cascade, view: SequenceView, limits: Budget, right: int, rounds: int = 1) -> list[DraftTree]:
    """Rounds of one request that each commit the first ``right`` of the tokens 5, 6, …. Returns what was drafted."""
    cascade.open(view)
    return [play_together(cascade, {0: (view, right)}, limits)[0] for _ in range(rounds)]


def play_together(
    cascade: Cascade, requests: Mapping[int, tuple[SequenceView, int]], limits: Budget
) -> list[DraftTree]:
    """One round of several requests, each with how many tokens of its draft are right."""
    views = [view for view, _ in requests.values()]
    trees = cascade.propose(views, limits)
    observations: list[Observation] = []
    for (view, right), tree in zip(requests.values(), trees, strict=True):
        committed = [*range(5, 5 + right), 3]
        hidden = {layer: torch.zeros(1 + len(tree), 4) for layer in cascade.wants.hidden_layers}
        commit(view, committed)
        observations.append(Observation(view, committed, [3, *tree.tokens], [0], tree, hidden=hidden))
    cascade.observe(observations)
    return trees


def view_of(tenant: str = "a", request_id: int = 0) -> SequenceView:
    return make_view([3], request_id, tenant=tenant, room=10_000)


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


def test_the_slower_one_is_asked_for_less() -> None:
    """All of them are right as often; what differs is what the clock says of them."""
    levels: list[int] = []
    for factor in (1, 4, 8, 60):
        costly = Costly((0.75,), factor * SECONDS)
        cascade = Cascade([Lookup(), costly])
        for turn in range(240):
            play(cascade, view_of(), budget(plain=20, depth=6), right=(0, 1, 3, 6, 2)[turn % 5])
        levels.append(sum(depth for _, depth in costly.asked))
    fast, slower, slow, hopeless = levels
    assert fast > 1.5 * slower > 3 * slow > 4 * hopeless
    assert hopeless < 240 // 4, "it takes longer than all that it wins, and gets a trial now and then"


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


def test_requests_of_one_round_are_each_their_tenants() -> None:
    """One tenant's drafts are right and another's never, beside one that only copies: none has a say in the others'."""
    costly = Costly()
    cascade = Cascade([Lookup(), costly])
    requests = {0: (view_of("good", 0), 2), 1: (view_of("bad", 1), 0), 2: (view_of("good", 2), 2)}
    limits = budget(plain=30, row=1, requests=3)
    for view, _ in requests.values():
        cascade.open(view)
    for _ in range(80):
        play_together(cascade, requests, limits)
    asked = [tenant for tenant, _ in costly.asked]
    assert asked.count("good") == 160
    assert asked.count("bad") < 60
    assert "bad" in costly.paused
    assert "good" not in costly.paused


def test_what_others_emit_is_no_merit_of_the_draft() -> None:
    """One request of eight is drafted for: its second token is worth an eighth of a round, and the draft costs more."""
    alone, crowded = Costly((0.6,)), Costly((0.6,))
    for costly, requests in ((alone, 1), (crowded, 8)):
        cascade = Cascade([Lookup(), costly])
        limits = budget(plain=4, depth=1, requests=requests)
        for turn in range(120):
            play(cascade, view_of(), limits, right=int(turn % 5 > 1))
    assert len(alone.asked) == 120
    assert len(crowded.asked) < 40


def test_a_newcomer_is_seen_whatever_the_others_do() -> None:
    costly = Costly()
    cascade = Cascade([Lookup(), costly])
    old = view_of("old")
    cascade.open(old)
    play(cascade, old, budget(plain=2), right=0, rounds=40)
    assert cascade.wants == Wants()
    new = view_of("new", 1)
    cascade.open(new)
    assert cascade.wants.hidden_layers == (LAYER,), "its prompt comes with hidden states"
    play(cascade, old, budget(plain=2), right=0)
    assert cascade.wants.hidden_layers == (LAYER,)
    cascade.close(new)
    play(cascade, old, budget(plain=2), right=0)
    assert cascade.wants == Wants()


def test_a_prompt_in_chunks_is_no_trial() -> None:
    costly, view = Costly(), view_of()
    cascade = Cascade([Lookup(), costly])
    play(cascade, view, budget(plain=50), right=2)
    for start in range(0, 100, 10):
        hidden = {LAYER: torch.zeros(10, 4)}
        cascade.observe([Observation(view, [], [], [], context=[3] * 10, start=start, hidden=hidden)])
    assert not costly.paused
    assert costly.told == 11


def test_whether_a_second_model_is_asked_is_not_for_the_first_to_say() -> None:
    """What a model draws must not decide how it is judged: see `_one_drawn`."""
    for chance in (0.0, 0.99):

        class First(Lookup):
            name = "first"
            needs_model = True

        second = Costly((0.9,))
        cascade = Cascade([First(chance), second])
        play(cascade, view_of(), budget(plain=4), right=2, rounds=20)
        assert len(second.asked) == 20


def test_one_that_is_never_right_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        play(Cascade([Lookup(), Costly()]), view_of(), budget(plain=2), right=0, rounds=9000)
        assert [record for record in caplog.records if "'costly' has not been right once" in record.getMessage()]
        caplog.clear()
        play(Cascade([Lookup(), Costly()]), view_of(), budget(plain=50), right=1, rounds=60)
        assert not caplog.records


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
