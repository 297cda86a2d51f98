"""Speculation per request, and counters that agree with the requests' own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from outrider.core.config import EngineConfig, SpeculativeConfig, SpeculativeOverride
from outrider.core.errors import ConfigError, UnknownNameError
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Budget, Drafter, SequenceView, Wants
from outrider.engine.outputs import SpeculationStats
from outrider.engine.speculators import _MOST_OTHERS
from outrider.executors.base import CostCurve, ForwardOutput, Segment
from tests.support.fake_llm import repetitive_logits
from tests.support.fakes import VOCAB, ChaosDrafter, FakeExecutor, make_engine, random_logits, run

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def sources(statistics: SpeculationStats) -> set[str]:
    return set(statistics.drafted_by_source)


def test_each_request_is_drafted_for_by_the_method_it_asked_for() -> None:
    engine = make_engine(ChaosDrafter(1), executor=FakeExecutor(repetitive_logits))
    asked = [None, "none", "ngram", "suffix+recycle", "recycle"]
    requests = [
        engine.add([5, 6, 7, 5, 6, 7], LONG, speculation=SpeculativeOverride(method) if method else None)
        for method in asked
    ]
    run(engine, requests)
    found = [sources(request.statistics) for request in requests]
    assert found == [{"chaos"}, set(), {"ngram"}, {"suffix", "recycle"}, {"recycle"}]
    assert len({tuple(request.result().token_ids) for request in requests}) == 1


def test_ways_to_speculate_are_not_kept_without_end() -> None:
    """Clients name members in any order, each of which is another cascade; a running request keeps its own."""
    engine = make_engine(ChaosDrafter(1), executor=FakeExecutor(repetitive_logits))
    names = ["ngram", "suffix", "recycle", "lookahead", "auto"]
    orders = ["+".join(order) for size in (2, 3) for order in permutations(names, size)]
    first = engine.add([5, 6, 7, 5, 6, 7], LONG, speculation=SpeculativeOverride("suffix+ngram"))
    engine.step()
    others = [engine.add([5, 6, 7], SamplingParams(max_tokens=2), speculation=SpeculativeOverride(o)) for o in orders]
    assert len(orders) > _MOST_OTHERS
    assert len(engine._speculators._others) == _MOST_OTHERS
    run(engine, [first, *others])
    assert sources(first.statistics) == {"suffix", "ngram"}
    assert all(request.result().error is None for request in others)


def test_the_number_of_draft_tokens_is_the_requests_own() -> None:
    widest: dict[int, int] = {}

    class Watching(ChaosDrafter):
        def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
            widest.update((view.request_id, budget.nodes) for view in views)
            return super().propose(views, budget)

    engine = make_engine(Watching(1))
    requests = [
        engine.add([5, 6], LONG, speculation=SpeculativeOverride(num_speculative_tokens=number) if number else None)
        for number in (None, 1, 20)
    ]
    run(engine, requests)
    assert [widest[request.id] for request in requests] == [8, 1, 20]


class _Watching(ChaosDrafter):
    """Notes the budgets that it is given."""

    def __init__(self) -> None:
        super().__init__(1)
        self.budgets: list[Budget] = []
        self.row_prices: list[float] = []

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        self.budgets.append(budget)
        if budget.price is not None:
            self.row_prices.append(budget.price(1) / budget.price(0) - 1)
        return super().propose(views, budget)


@pytest.mark.parametrize(("deepest", "depth"), [(None, 8), (3, 3), (20, 8)])
def test_nobody_is_asked_for_more_levels_than_it_has(deepest: int | None, depth: int) -> None:
    drafter = _Watching()
    drafter.deepest = deepest
    engine = make_engine(drafter)
    run(engine, [engine.add([5, 6], LONG)])
    assert {(budget.nodes, budget.depth) for budget in drafter.budgets} == {(8, depth)}


def test_the_budget_says_what_cannot_pay() -> None:
    """Draft rows take a tenth of a round each: a node must promise a twentieth, if its drafter is to be believed."""
    drafter = _Watching()
    engine = make_engine(drafter, price=CostCurve((1, 2, 64), (1.0, 1.1, 7.3)))
    run(engine, [engine.add([5, 6], LONG)])
    assert drafter.row_prices[0] == pytest.approx(0.1)
    assert drafter.budgets[0].least_chance == pytest.approx(0.05)


def test_without_prices_every_node_may_pay() -> None:
    drafter = _Watching()
    engine = make_engine(drafter)
    run(engine, [engine.add([5, 6], LONG)])
    assert {(budget.price, budget.least_chance) for budget in drafter.budgets} == {(None, 0.0)}


class _Clock:
    """Stands for the module ``time``: nothing takes time but what says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _Timed(FakeExecutor):
    """A pass takes a second, and a hundredth more for each row beyond the first."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def forward(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> ForwardOutput:
        self._clock.now += 0.99 + 0.01 * sum(len(segment.tokens) for segment in segments)
        return super().forward(segments, hidden_layers)


class _Foresight(Drafter):
    """Drafts what greedy decoding will say, right three times in four, and takes as long for each token as it is told.
    asked: levels in all.
    """

    name = "foresight"

    def __init__(self, clock: _Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.asked = 0

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        self.asked += budget.depth
        self._clock.now += self._seconds * budget.depth
        return [self._chain(view, min(budget.depth, view.room)) for view in views]

    def _chain(self, view: SequenceView, depth: int) -> DraftTree:
        text = list(view.tokens)
        for _ in range(depth):
            text.append((int(random_logits(text).argmax()) + (len(text) % 4 == 0)) % VOCAB)
        return DraftTree.chain(text[len(view.tokens) :], [0.75] * depth)


def test_a_slow_drafter_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is right as often as the fast one; what differs is what the clock says of it."""
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    asked, texts = [], []
    for seconds in (0.001, 0.2, 5.0):
        clock = _Clock()
        for module in ("engine", "speculators"):
            monkeypatch.setattr(f"outrider.engine.{module}.time", clock)
        drafter = _Foresight(clock, seconds)
        engine = make_engine(drafter, executor=_Timed(clock), price=CostCurve((1, 2, 64), (1.0, 1.01, 1.63)))
        request = engine.add([5, 6, 7], params)
        run(engine, [request])
        texts.append(request.result().token_ids)
        asked.append(drafter.asked)
    assert texts[0] == texts[1] == texts[2]
    fast, slow, hopeless = asked
    assert fast > 2 * slow > 4 * hopeless


@pytest.mark.parametrize(
    ("method", "error", "says"),
    [
        ("draft_model", ConfigError, "needs a model that is not loaded"),
        ("suffix+draft_model", ConfigError, "needs a model that is not loaded"),
        ("sufix", UnknownNameError, "did you mean 'suffix'"),
        ("", UnknownNameError, "unknown speculative method"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(method: str, error: type[Exception], says: str) -> None:
    engine = make_engine(ChaosDrafter(1))
    with pytest.raises(error, match=says) as refused:
        engine.new_request([5], LONG, speculation=SpeculativeOverride(method))
    assert "\n" not in str(refused.value)
    run(engine, [engine.add([5], LONG)])


@pytest.mark.parametrize("caching", [True, False])
def test_counters_agree_with_the_requests(caching: bool) -> None:
    executor = FakeExecutor(repetitive_logits, kv_tokens=200, page_size=4)
    engine = make_engine(
        ChaosDrafter(2), executor=executor, engine_config=EngineConfig(enable_prefix_caching=caching, prefill_chunk=5)
    )
    methods = [None, "ngram", "suffix+recycle", "none"] * 5
    requests = [
        engine.add([5, 6, 7] * 4, LONG, speculation=SpeculativeOverride(method) if method else None)
        for method in methods
    ]
    run(engine, requests)
    stats, total = engine.stats, SpeculationStats.total(request.statistics for request in requests)
    assert stats.generation_tokens == total.committed == 20 * 60
    assert stats.prompt_tokens == 20 * 12
    assert stats.num_drafts == total.drafted_rounds > 0
    assert stats.num_draft_tokens == total.drafted
    assert stats.num_accepted_tokens == total.accepted > 0
    assert stats.accepted_per_pos == total.accepted_by_position
    assert {name: counts["draft_tokens"] for name, counts in stats.by_drafter.items()} == total.drafted_by_source
    accepted = {name: counts["accepted_tokens"] for name, counts in stats.by_drafter.items()}
    assert {name: count for name, count in accepted.items() if count} == total.accepted_by_source
    for counts in stats.by_drafter.values():
        assert 0 < counts["drafts"] <= counts["draft_tokens"]
    for name in ("draft_seconds", "verify_seconds", "accept_seconds", "engine_seconds"):
        assert getattr(stats, name) == pytest.approx(getattr(total, name))
    for counts in stats.by_drafter.values():
        assert sum(counts["accepted_per_pos"]) == counts["accepted_tokens"]
    plans = stats.plans
    assert plans.proposed >= plans.admitted == stats.num_draft_tokens
    assert sum(plans.by_nodes) == plans.speculative + plans.declined + plans.plain <= stats.rounds
    assert plans.requests == total.rounds
    assert stats.preemptions == sum(request.preemptions for request in requests) > 0
    assert stats.rounds <= executor.forwards
    assert stats.prefix_cache_queries == (240 if caching else 0)
    assert stats.prefix_cache_hits == sum(request.cached_tokens for request in requests)
    assert (stats.prefix_cache_hits > 0) == caching
    assert (stats.running, stats.waiting, stats.kv_tokens_used) == (0, 0, 0)


def test_failures_are_counted_once_each() -> None:
    class Broken(ChaosDrafter):
        def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
            raise RuntimeError("poisoned")

    engine = make_engine(Broken(1))
    requests = [engine.add([5], SamplingParams(max_tokens=3, ignore_eos=True)) for _ in range(2)]
    run(engine, requests)
    # Two of three rounds: in the last one there is no room for a draft.
    assert engine.stats.drafter_failures == 2
    assert engine.stats.failures_by_drafter == {"chaos": 2}
    assert [request.statistics.failures for request in requests] == [2, 2]


def test_a_cascade_that_fails_altogether_is_counted_by_member_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under no name of its own: which order its members are named in is a client's business, and no metric's label."""

    def broken(*_: object) -> list[DraftTree]:
        raise RuntimeError("poisoned")

    for drafter in ("ngram", "suffix"):
        monkeypatch.setattr(DRAFTERS.get(drafter), "propose", broken)
    engine = make_engine(ChaosDrafter(1))
    requests = [
        engine.add([5], SamplingParams(max_tokens=3, ignore_eos=True), speculation=SpeculativeOverride(method))
        for method in ("ngram+suffix", "suffix+ngram", "ngram", "recycle")
    ]
    run(engine, requests)
    # Two of three rounds: in the last one there is no room for a draft.
    assert [request.statistics.failures for request in requests] == [2, 2, 2, 0]
    assert engine.stats.failures_by_drafter == {"ngram": 6, "suffix": 4}


class Reader(ChaosDrafter):
    """Keeps the hidden states of every row that it is shown, by position."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__(1)
        self.wants = Wants(hidden_layers=(1,), whole_prompt=whole)

    def positions(self, request_id: int) -> set[int]:
        seen: set[int] = set()
        for observation in self.observed:
            if observation.view.request_id == request_id:
                rows = [*observation.context, *observation.rows[:1]]
                assert observation.hidden[1][: len(rows), 0].tolist() == rows
                start = observation.start
                assert observation.view.tokens[start : start + len(rows)] == rows
                seen.update(range(start, start + len(rows)))
        return seen


@pytest.mark.parametrize("whole", [True, False])
def test_a_drafter_is_told_what_it_was_not_shown(whole: bool) -> None:
    """Positions taken from the cache are not observed; a drafter that needs them all has them forwarded."""
    drafter = Reader(whole=whole)
    engine = make_engine(drafter, executor=FakeExecutor(page_size=4), engine_config=EngineConfig(prefill_chunk=6))
    prompt = list(range(3, 17))
    first, second = (engine.new_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True)) for _ in range(2))
    for request in (first, second):
        engine.submit(request)
        run(engine, [request])
    assert drafter.positions(first.id) == set(range(14))
    assert drafter.positions(second.id) == (set(range(14)) if whole else {12, 13})
    assert second.cached_tokens == (0 if whole else 12)


def test_a_draft_model_that_is_loaded_may_be_joined_with_others() -> None:
    from outrider.drafters import build
    from outrider.drafters.base import DrafterContext
    from tests.support.fakes import OpenFake, fake_model

    config = SpeculativeConfig(method="draft_model", model="fake", num_speculative_tokens=4)
    drafter = build(DrafterContext(config, fake_model(), OpenFake()))
    engine = make_engine(drafter, config=config, executor=FakeExecutor(repetitive_logits))
    requests = [
        engine.add([5, 6, 7], LONG, speculation=SpeculativeOverride(method) if method else None)
        for method in (None, "suffix+draft_model", "none")
    ]
    run(engine, requests)
    assert "draft_model" in sources(requests[1].statistics)
    assert not sources(requests[2].statistics)
