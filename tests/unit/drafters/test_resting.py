"""A drafter that is alone: told of the rounds while drafts are asked for, and at rest while they are not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch

from outrider.core.config import SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters import assemble
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView, Wants
from outrider.drafters.resting import Resting
from outrider.executors.base import CostCurve, ForwardOutput, Segment
from tests.support.fake_heads import OpenFakeHeads, build_with_heads, hidden
from tests.support.fakes import FakeExecutor, fake_model, make_engine, run
from tests.unit.drafters.simulation import commit, make_view

LAYER = 2


class Follower(Drafter):
    """Wants hidden states, and counts what it is told."""

    name = "follower"
    wants = Wants(hidden_layers=(LAYER,))
    token = 5

    def __init__(self) -> None:
        self.told: list[str] = []
        self.asked: list[str] = []
        self.paused: list[int] = []

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        self.asked += [view.tenant for view in views]
        return [DraftTree.chain([self.token], [0.5])] * len(views)

    def observe(self, observations: Sequence[Observation]) -> None:
        assert all(LAYER in observation.hidden for observation in observations)
        self.told += [observation.view.tenant for observation in observations]

    def pause(self, view: SequenceView) -> None:
        self.paused.append(view.request_id)


def priced() -> Budget:
    return Budget(1, 1, lambda nodes: 1.0 + nodes)


def play(drafter: Resting, views: Sequence[SequenceView], rounds: int, ask: Sequence[str], every: int = 1) -> None:
    """Rounds of some requests. ask: tenants that are asked for drafts, in every ``every``-th round."""
    for number in range(rounds):
        asked = [view for view in views if view.tenant in ask and number % every == every - 1]
        trees = drafter.propose(asked, priced()) if asked else []
        assert len(trees) == len(asked)
        observations = []
        for view in views:
            commit(view, [3])
            states = {layer: torch.zeros(1, 4) for layer in drafter.wants.hidden_layers}
            observations.append(Observation(view, [3], [3], [0], hidden=states))
        drafter.observe(observations)


def opened(*tenants: str) -> tuple[Resting, Follower, list[SequenceView]]:
    follower = Follower()
    drafter = Resting(follower)
    views = [make_view([3], number, tenant=tenant, room=10_000) for number, tenant in enumerate(tenants)]
    for view in views:
        drafter.open(view)
    return drafter, follower, views


def test_one_that_is_asked_follows_every_round() -> None:
    drafter, follower, views = opened("a")
    play(drafter, views, 300, ["a"])
    assert len(follower.told) == len(follower.asked) == 300
    assert not follower.paused


def test_one_that_is_not_asked_rests_and_gets_a_trial() -> None:
    drafter, follower, views = opened("a")
    play(drafter, views, 40, ["a"])
    follower.told.clear()
    play(drafter, views, 60, [])
    assert follower.paused == [0]
    assert drafter.wants == Wants(), "the target's hidden states are no longer copied for it"
    told = len(follower.told)
    assert told < 50
    play(drafter, views, 40, [])
    assert len(follower.told) == told
    play(drafter, views, 60, [])
    assert len(follower.told) == told + 24, "a trial"
    assert follower.paused == [0, 0]


def test_now_and_then_is_not_in_earnest() -> None:
    drafter, follower, views = opened("a")
    play(drafter, views, 1600, ["a"], every=16)
    assert len(follower.told) < 200
    assert 0 < len(follower.asked) < 15


def test_one_that_has_come_to_pay_by_its_trial_stays() -> None:
    drafter, follower, views = opened("a")
    play(drafter, views, 110, [])
    assert drafter.wants == follower.wants
    follower.told.clear()
    play(drafter, views, 200, ["a"])
    assert len(follower.told) == 200


def test_each_tenant_has_its_own_rest() -> None:
    drafter, follower, views = opened("good", "bad")
    play(drafter, views, 90, ["good"])
    assert follower.told.count("good") == 90
    assert follower.told.count("bad") == 6
    assert follower.paused == [1]
    assert drafter.propose(views, priced())[1] == DraftTree()
    drafter.close(views[0])
    play(drafter, views[1:], 1, [])
    assert drafter.wants == Wants()


def test_a_prompt_in_chunks_is_no_round() -> None:
    drafter, follower, views = opened("a")
    play(drafter, views, 2, ["a"])
    for start in range(0, 200, 10):
        states = {LAYER: torch.zeros(10, 4)}
        drafter.observe([Observation(views[0], [], [], [], context=[3] * 10, start=start, hidden=states)])
    assert len(follower.told) == 22
    assert not follower.paused


def test_without_a_price_it_never_rests() -> None:
    drafter, follower, views = opened("a")
    drafter.propose(views, Budget(1, 1))
    play(drafter, views, 300, [])
    assert len(follower.told) == 300


def test_one_that_fails_is_counted_on() -> None:
    """The engine gets to see the failure, and the rounds go on being counted."""

    class Broken(Follower):
        def observe(self, observations: Sequence[Observation]) -> None:
            raise RuntimeError("broken")

    drafter = Resting(broken := Broken())
    view = make_view([3], room=10_000)
    drafter.open(view)
    drafter.propose([view], priced())
    for _ in range(6):
        with pytest.raises(RuntimeError):
            play(drafter, [view], 1, [])
    assert broken.paused == [0]
    assert drafter.wants == Wants()


def test_one_that_is_never_right_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It drafts 5, and 3 is what comes."""
    drafter, _, views = opened("a")
    with caplog.at_level(logging.WARNING):
        play(drafter, views, 15, ["a"])
        assert not caplog.records
        play(drafter, views, 200, ["a"])
    (record,) = caplog.records
    assert "'follower' has not been right once in 16 drafts" in record.getMessage()


def test_one_that_is_right_now_and_then_is_not(caplog: pytest.LogCaptureFixture) -> None:
    drafter, follower, views = opened("a")
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            follower.token = 3
            play(drafter, views, 1, ["a"])
            follower.token = 5
            play(drafter, views, 9, ["a"])
    assert not caplog.records


@pytest.mark.parametrize(("adaptive", "rests"), [(True, True), (False, False)])
def test_who_may_rest(adaptive: bool, rests: bool) -> None:
    context = DrafterContext(SpeculativeConfig(method="mtp", adaptive=adaptive), fake_model(), OpenFakeHeads())
    assert isinstance(build_with_heads(context), Resting) == rests
    assert not isinstance(assemble(["suffix"], context, {}), Resting)


class Watched(FakeExecutor):
    """Remembers in which passes hidden states were asked for."""

    def __init__(self) -> None:
        super().__init__(hidden=hidden)
        self.asked: list[bool] = []

    def forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int] = (), features: torch.Tensor | None = None
    ) -> ForwardOutput:
        self.asked.append(bool(hidden_layers))
        return super().forward(segments, hidden_layers, features)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa"])
def test_where_drafting_never_pays_text_is_the_same_and_states_are_copied_for_trials_alone(method: str) -> None:
    """Two rows take ten times as long as one: nothing that can be drafted is worth it."""
    params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.8, seed=1)
    texts = {}
    for adaptive in (True, False):
        own = SpeculativeConfig(method=method, num_speculative_tokens=4, adaptive=adaptive)
        drafter = build_with_heads(DrafterContext(own, fake_model(), OpenFakeHeads(3.0)))
        executor = Watched()
        engine = make_engine(
            drafter, config=own, executor=executor, model=fake_model(), price=CostCurve((1, 2, 8), (1e-2, 1e-1, 1.0))
        )
        request = engine.add([3, 4, 5, 6], params)
        run(engine, [request])
        assert engine.stats.drafter_failures == 0
        texts[adaptive] = list(request.output.token_ids)
        if adaptive:
            assert not any(executor.asked[60:90]), "at rest"
            woken = [n for n, asked in enumerate(executor.asked) if asked and n > 90]
            assert 0 < len(woken) < 80, "trials"
        else:
            assert all(executor.asked)
    assert texts[True] == texts[False]
