"""The planner's choices, on price lists made for the purpose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget
from outrider.drafters.calibration import Calibrator
from outrider.drafters.pace import Pace
from outrider.engine.planner import Planner
from outrider.engine.price import ForwardPrice
from outrider.engine.request import trim
from outrider.executors.base import CostCurve, ForwardOutput, Segment
from tests.support.fake_llm import fake_llm, use_fakes
from tests.support.fakes import ChaosDrafter, FakeExecutor, make_engine, run


class Honest(Calibrator):
    """Takes scores at their word."""

    def path_probabilities(self, tree: DraftTree, request_id: int) -> list[float]:
        result: list[float] = []
        for parent, score in zip(tree.parents, tree.scores, strict=True):
            result.append(score * (result[parent] if parent >= 0 else 1.0))
        return result


class Stub:
    """As much of a request as planners look at."""

    def __init__(self, tenant: str = "default", request_id: int = 0) -> None:
        self.view = SimpleNamespace(tenant=tenant, request_id=request_id)


def price(seconds: Sequence[float]) -> ForwardPrice:
    return ForwardPrice(lambda: CostCurve(tuple(range(1, len(seconds) + 1)), tuple(seconds)))


def select(seconds: Sequence[float], trees: Sequence[DraftTree], most: int = 1000) -> list[DraftTree]:
    stubs = [Stub()] * len(trees)
    return Planner(price(seconds), calibrator=Honest).select(stubs, trees, len(trees), most)  # type: ignore[arg-type]


class Asked:
    """A pace with its price list, asked again and again for a full budget of ``nodes`` each way."""

    def __init__(self, seconds: Sequence[float], nodes: int) -> None:
        self.pace, self._price, self._nodes = Pace(), price(seconds), nodes

    def depth(self, batch_size: int = 1) -> int:
        full = Budget(self._nodes, self._nodes, lambda nodes: self._price.at(batch_size + nodes), batch_size)
        return self.pace.budget(full, batch_size).depth

    def round(self, tree: DraftTree, committed: Sequence[int], seconds: float) -> None:
        self.pace.draft.observe([tree], seconds)
        self.pace.observe_committed(tree, committed)


def chain(*scores: float) -> DraftTree:
    return DraftTree.chain(list(range(3, 3 + len(scores))), scores)


def test_free_rows_are_all_taken() -> None:
    tree = chain(0.5, 0.5, 0.01)
    assert select([1.0] * 8, [tree])[0] is tree


def test_rows_that_cost_as_much_as_a_round_are_not() -> None:
    kept = select([1.0, 2.0, 3.0, 4.0], [chain(0.9, 0.9)])
    assert len(kept[0]) == 0


def test_a_bump_in_the_price_does_not_hide_what_lies_behind() -> None:
    """The second row is dear, the next ones are free: with enough of them the bump is worth it."""
    assert len(select([1.0, 1.9, 1.9, 1.9, 1.9], [chain(0.8, 0.9, 0.9, 0.9)])[0]) == 4


def test_the_better_request_gets_the_rows() -> None:
    kept = select([1.0, 1.0, 1.3, 3.0, 9.0], [chain(0.2, 0.1), chain(0.9, 0.1)])
    assert [len(tree) for tree in kept] == [0, 1]


def test_no_choice_of_nodes_promises_more() -> None:
    """Against every closed subset of small random trees."""
    rng = random.Random(0)
    for _ in range(50):
        n = rng.randint(1, 7)
        tree = DraftTree(
            list(range(3, 3 + n)), [rng.randint(-1, i - 1) for i in range(n)], [rng.random() for _ in range(n)]
        )
        seconds = list(itertools.accumulate([1.0, *(rng.random() * 0.4 for _ in range(n))]))
        probabilities = Honest().path_probabilities(tree, 0)

        def rate(nodes: Sequence[int], p: Sequence[float] = probabilities, s: Sequence[float] = seconds) -> float:
            return (1 + sum(p[i] for i in nodes)) / s[len(nodes)]

        best = max(
            rate(nodes)
            for size in range(n + 1)
            for nodes in itertools.combinations(range(n), size)
            if all(tree.parents[i] in (-1, *nodes) for i in nodes)
        )
        kept = select(seconds, [tree])[0]
        assert rate([tree.tokens.index(t) for t in kept.tokens]) == pytest.approx(best)


def asked_once() -> ForwardPrice:
    machine = ForwardPrice(lambda: CostCurve((1, 4, 16), (1.0, 1.0, 2.0)))
    assert machine.at(1) == 1.0
    return machine


def test_the_machine_is_measured_when_a_price_is_asked_for() -> None:
    measured: list[int] = []

    def measure() -> CostCurve:
        measured.append(1)
        return CostCurve((1, 2), (1.0, 1.5))

    machine = ForwardPrice(measure)
    machine.observe(1, 5.0)
    assert not measured
    assert machine.at(2) == 1.5
    assert machine.chunk_beside(1) >= 1
    assert measured == [1]


def test_plain_decoding_never_measures_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    measure = FakeExecutor.measure_cost

    def counted(self: FakeExecutor, **options: Any) -> CostCurve:
        measured.append(1)
        return measure(self, **options)

    monkeypatch.setattr(FakeExecutor, "measure_cost", counted)
    use_fakes(monkeypatch)
    for method in ("none", "ngram"):
        assert not measured
        fake_llm(method).generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert measured, "drafts are planned by prices"


def a_second_for_four_rows(monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    """An executor whose passes take a quarter of a second a row, by a clock that counts nothing else."""
    now = [0.0]
    forward = FakeExecutor.forward

    def timed(self: FakeExecutor, segments: Sequence[Segment], *args: Any, **options: Any) -> ForwardOutput:
        now[0] += 0.25 * sum(len(segment.tokens) for segment in segments)
        return forward(self, segments, *args, **options)

    monkeypatch.setattr(FakeExecutor, "forward", timed)
    monkeypatch.setattr("outrider.executors.base.time.perf_counter", lambda: now[0])
    return FakeExecutor()


def test_somebody_who_waits_gets_the_prices_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = a_second_for_four_rows(monkeypatch)
    assert executor.measure_cost(patience=0.5) == CostCurve((1, 2, 4, 8, 16), (0.25, 0.5, 1.0, 2.0, 4.0))
    assert executor.measure_cost().rows == (1, 2, 4, 8, 16, 32, 64)
    assert executor.measure_cost(rows=(20, 40), patience=0.5) == CostCurve((20,), (5.0,))


def test_the_measured_curve_is_what_planners_start_with_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    asked: list[float | None] = []
    measure = FakeExecutor.measure_cost

    def noted(self: FakeExecutor, **options: Any) -> CostCurve:
        asked.append(options.get("patience"))
        return measure(self, **options)

    monkeypatch.setattr(FakeExecutor, "measure_cost", noted)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    fake_llm("ngram").generate([[5, 6, 7]], params, use_tqdm=False)
    llm = fake_llm("ngram")
    curve = llm.cost_curve
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert [patience is not None for patience in asked] == [True, False]
    assert llm.cost_curve is curve


def test_price_follows_a_machine_that_slows_down() -> None:
    machine = asked_once()
    for _ in range(200):
        machine.observe(1, 3.0)
        machine.observe(10, 6.0)
    assert machine.at(1) == pytest.approx(3.0, rel=0.1)
    assert machine.at(10) == pytest.approx(6.0, rel=0.1)
    before = machine.at(16)
    machine.observe(500, 100.0)
    assert machine.at(16) == before


def test_a_hiccup_is_not_taken_for_the_machine() -> None:
    machine = asked_once()
    machine.observe(1, 100.0)
    assert machine.at(1) < 1.3
    before = machine.chunk_beside(8)
    machine.observe_chunk(8, 4, 100.0)
    assert machine.chunk_beside(8) > 0.8 * before


def test_a_slower_machine_is_seen_where_nobody_looks() -> None:
    machine = asked_once()
    for _ in range(100):
        machine.observe(16, 2 * 2.0)
    assert machine.at(1) > 1.2


def test_a_dear_drafter_in_vain_is_asked_for_less_and_probed_again() -> None:
    asked = Asked([1.0] * 32, nodes=8)
    assert asked.depth() == 8
    for _ in range(100):
        asked.round(chain(0.5, 0.5, 0.5, 0.5), [9], seconds=2.0)
    depths = [asked.depth() for _ in range(64)]
    assert set(depths) == {0, 1}
    assert 1 <= depths.count(1) <= 8


def test_a_dear_drafter_that_gets_better_gets_its_depth_back() -> None:
    asked = Asked([1.0] * 32, nodes=8)
    for _ in range(100):
        asked.round(chain(*[0.9] * 8), [9], seconds=0.8)
    assert asked.depth() <= 1
    for _ in range(2000):
        depth = asked.depth()
        if depth:
            shallow = chain(*[0.9] * depth)
            asked.pace.observe_committed(shallow, [*shallow.tokens, 9])
    assert asked.depth() == 8


def test_drafts_that_lose_time_are_not_asked_for_until_a_probe_pays() -> None:
    asked = Asked([1.0] * 32, nodes=8)
    for _ in range(20):
        asked.pace.observe_profit(8, -0.1)
    depths = [asked.depth(batch_size=9) for _ in range(64)]
    assert depths.count(8) == 4, "one round in sixteen tries again"
    assert depths.count(0) == 60
    assert asked.depth(batch_size=1) == 8, "what does not pay for eight may pay for one"
    for _ in range(100):
        asked.pace.observe_profit(8, 0.1)
    assert [asked.depth(batch_size=9) for _ in range(64)] == [8] * 64


def test_nodes_that_were_left_out_can_come_back() -> None:
    """The steep price keeps a drafter out after many wrong rounds; being right, though unverified, brings it back."""
    plan = Planner(price([1.0, 1.5, 2.0, 2.5]))
    tree = DraftTree([3, 4], [-1, 0], [0.9, 0.9], sources=[("x",), ("x",)])
    for _ in range(200):
        plan.observe_committed(Stub(), tree, [9])  # type: ignore[arg-type]
    assert len(plan.select([Stub()], [tree], 1, 99)[0]) == 0  # type: ignore[list-item]
    for _ in range(200):
        plan.observe_committed(Stub(), tree, [3, 4, 9])  # type: ignore[arg-type]
    assert len(plan.select([Stub()], [tree], 1, 99)[0]) == 2  # type: ignore[list-item]


def test_no_more_nodes_than_there_are_rows() -> None:
    kept = select([1.0] * 64, [chain(0.9, 0.8, 0.1), chain(0.85, 0.2)], most=3)
    assert [len(tree) for tree in kept] == [2, 1]


MACHINE = [1.0 + 0.01 * rows if rows <= 16 else 1.16 + 0.06 * (rows - 16) for rows in range(1, 129)]
"""A price list as CPUs have it: rows are nearly free while weights are what is waited for, then each costs its own."""


def test_deep_for_one_less_for_eight_none_when_the_batch_fills_the_machine() -> None:
    nodes = {}
    for batch_size in (1, 8, 64):
        kept = select(MACHINE, [chain(*[0.8] * 12)] * batch_size)
        nodes[batch_size] = sum(map(len, kept)) / batch_size
    assert nodes[1] >= 8
    assert 0 < nodes[8] < nodes[1]
    assert nodes[64] == 0


def test_a_dear_drafter_that_is_right_keeps_its_depth() -> None:
    asked = Asked([1.0] * 32, nodes=8)
    tree = chain(0.9, 0.9, 0.9, 0.9)
    for _ in range(100):
        asked.round(tree, [*tree.tokens, 9], seconds=0.4)
    assert asked.depth() == 8


def test_what_one_tenant_says_does_not_move_another() -> None:
    plan = Planner(price([1.0, 1.5, 2.0, 2.5]))
    tree = DraftTree([3, 4], [-1, 0], [0.9, 0.9], sources=[("x",), ("x",)])
    for _ in range(200):
        plan.observe_committed(Stub("a", 1), tree, [9])  # type: ignore[arg-type]
    assert len(plan.select([Stub("a", 2)], [tree], 1, 99)[0]) == 0  # type: ignore[list-item]
    assert len(plan.select([Stub("b", 2)], [tree], 1, 99)[0]) == 2  # type: ignore[list-item]


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("dearer", [1.0, 4.0], ids=["as measured", "far down a prompt"])
def test_a_chunk_beside_others_keeps_the_round_short(rows: int, dearer: float) -> None:
    """Whatever a prompt's row really costs, chunks soon have the size that the round has time for."""
    machine = price(MACHINE)
    plain = machine.at(rows)

    def seconds(chunk: int) -> float:
        return plain + dearer * (machine.at(rows + chunk) - plain)

    for _ in range(60):
        chunk = machine.chunk_beside(rows)
        machine.observe_chunk(rows, chunk, seconds(chunk))
    assert seconds(machine.chunk_beside(rows)) <= 1.8 * plain
    assert seconds(machine.chunk_beside(rows) + 4) > 1.4 * plain


def test_planning_changes_the_clock_only() -> None:
    texts = []
    for seconds in ([1.0] * 32, [1.0, 1.5, 1.6, 2.5], [1.0, 9.0]):
        curve = CostCurve(tuple(range(1, len(seconds) + 1)), tuple(seconds))
        engine = make_engine(ChaosDrafter(1), price=curve)
        requests = [engine.add([5, 6], SamplingParams(max_tokens=40, temperature=1, seed=s)) for s in range(4)]
        run(engine, requests)
        texts.append([request.result().token_ids for request in requests])
    assert texts[0] == texts[1] == texts[2]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    return DraftTree(list(range(3, 3 + n)), parents, [0.5] * n)


@given(trees(), st.integers(0, 5), st.sets(st.integers(3, 15)), st.booleans())
def test_trim_keeps_what_can_be_of_use(tree: DraftTree, room: int, ends: set[int], one_path: bool) -> None:
    kept = trim(tree, room, frozenset(ends), chain=one_path)
    depths = dict(zip(tree.tokens, tree.depths(), strict=True))
    assert all(depths[token] <= room for token in kept.tokens)
    assert all(kept.tokens[p] not in ends for p in kept.parents if p >= 0)
    if one_path:
        assert kept.is_chain()
    else:
        useful = [
            node
            for node in range(len(tree))
            if depths[tree.tokens[node]] <= room and not {tree.tokens[a] for a in tree.path(node)[:-1]} & ends
        ]
        assert list(kept.tokens) == [tree.tokens[node] for node in useful]


def backed(worth: float, *scores: float) -> DraftTree:
    """A chain of the given scores beside a support of two nodes that is almost never accepted."""
    own = chain(*scores)
    n = len(scores)
    return DraftTree(
        [*own.tokens, 20, 21],
        [*own.parents, -1, n],
        [*scores, 0.001, 0.001],
        support=frozenset({n, n + 1}),
        support_worth=worth,
    )


def test_support_goes_along_where_its_worth_pays_for_its_rows() -> None:
    seconds = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    dear, cheap = backed(0.1, 0.05, 0.5), backed(0.5, 0.05, 0.5)
    assert len(select(seconds, [dear])[0]) == 0
    kept = select(seconds, [cheap])[0]
    assert (list(kept.tokens), kept.support, kept.support_worth) == ([20, 21], frozenset({0, 1}), 0.5)


def test_support_is_paid_for_as_any_other_row() -> None:
    """With two rows of the support in the round, the chain's come at the price of the fourth row and the fifth."""
    tree = backed(1.0, 0.5, 0.9)
    assert len(select([1.0, 1.0, 1.0, 1.05, 1.1], [tree])[0]) == 4
    assert len(select([1.0, 1.0, 1.0, 3.0, 6.0], [tree])[0]) == 2


def test_support_that_does_not_fit_leaves_its_rows_to_others() -> None:
    kept = select([1.0] * 8, [backed(5.0, 0.5, 0.5)], most=1)[0]
    assert (list(kept.tokens), kept.support) == ([3], frozenset())


def test_of_two_supports_the_better_one_stays() -> None:
    kept = select([1.0, 1.0, 1.2, 1.4, 9.0, 9.0], [backed(0.6), backed(0.9)])
    assert [len(tree.support) for tree in kept] == [0, 2]


def test_a_planner_without_prices_keeps_support_that_fits() -> None:
    stubs = [Stub()] * 2
    kept = Planner(None).select(stubs, [backed(0.0, 0.9, 0.9), backed(0.0)], 2, 5)  # type: ignore[arg-type]
    assert [len(tree.support) for tree in kept] == [2, 2]
    assert sum(map(len, kept)) == 5
