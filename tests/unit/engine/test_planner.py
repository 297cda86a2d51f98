"""The planner's choices, on price lists made for the purpose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.config import SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.calibration import Calibrator
from outrider.engine.planner import ForwardPrice, Planner
from outrider.engine.request import trim
from outrider.executors.base import CostCurve
from tests.support.fakes import ChaosDrafter, make_engine, run


class Honest(Calibrator):
    """Takes scores at their word."""

    def path_probabilities(self, tree: DraftTree, request_id: int) -> list[float]:
        result: list[float] = []
        for parent, score in zip(tree.parents, tree.scores, strict=True):
            result.append(score * (result[parent] if parent >= 0 else 1.0))
        return result


class View:
    request_id = 0


class Stub:
    view = View()


def planner(seconds: Sequence[float], nodes: int = 16) -> Planner:
    curve = CostCurve(tuple(range(1, len(seconds) + 1)), tuple(seconds))
    return Planner(SpeculativeConfig(num_speculative_tokens=nodes), ChaosDrafter(), Honest(), ForwardPrice(curve))


def chain(*scores: float) -> DraftTree:
    return DraftTree.chain(list(range(3, 3 + len(scores))), scores)


def test_free_rows_are_all_taken() -> None:
    tree = chain(0.5, 0.5, 0.01)
    assert planner([1.0] * 8).select([Stub()], [tree])[0] is tree  # type: ignore[list-item]


def test_rows_that_cost_as_much_as_a_round_are_not() -> None:
    kept = planner([1.0, 2.0, 3.0, 4.0]).select([Stub()], [chain(0.9, 0.9)])  # type: ignore[list-item]
    assert len(kept[0]) == 0


def test_a_bump_in_the_price_does_not_hide_what_lies_behind() -> None:
    """The second row is dear, the next ones are free: with enough of them the bump is worth it."""
    assert len(planner([1.0, 1.9, 1.9, 1.9, 1.9]).select([Stub()], [chain(0.8, 0.9, 0.9, 0.9)])[0]) == 4  # type: ignore[list-item]


def test_the_better_request_gets_the_rows() -> None:
    kept = planner([1.0, 1.0, 1.3, 3.0, 9.0]).select([Stub(), Stub()], [chain(0.2, 0.1), chain(0.9, 0.1)])  # type: ignore[list-item]
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
        kept = planner(seconds).select([Stub()], [tree])[0]  # type: ignore[list-item]
        assert rate([tree.tokens.index(t) for t in kept.tokens]) == pytest.approx(best)


def test_price_follows_a_machine_that_slows_down() -> None:
    price = ForwardPrice(CostCurve((1, 4, 16), (1.0, 1.0, 2.0)))
    for _ in range(200):
        price.observe(1, 3.0)
        price.observe(10, 6.0)
    assert price.at(1) == pytest.approx(3.0, rel=0.05)
    assert price.at(10) == pytest.approx(6.0, rel=0.05)
    before = price.at(16)
    price.observe(500, 100.0)
    assert price.at(16) == before


def test_a_dear_drafter_in_vain_is_asked_for_less_and_probed_again() -> None:
    plan = planner([1.0] * 32, nodes=8)
    tree = chain(0.5, 0.5, 0.5, 0.5)
    assert plan.budget(1).depth == 8
    for _ in range(100):
        plan.observe_draft([tree], 2.0)
        plan.observe_committed(Stub(), tree, [9])  # type: ignore[arg-type]
    depths = [plan.budget(1).depth for _ in range(64)]
    assert set(depths) == {0, 1}
    assert 1 <= depths.count(1) <= 8


def test_a_dear_drafter_that_gets_better_gets_its_depth_back() -> None:
    plan = planner([1.0] * 32, nodes=8)
    tree = chain(*[0.9] * 8)
    for _ in range(100):
        plan.observe_draft([tree], 0.8)
        plan.observe_committed(Stub(), tree, [9])  # type: ignore[arg-type]
    assert plan.budget(1).depth <= 1
    for _ in range(2000):
        depth = plan.budget(1).depth
        if depth:
            shallow = chain(*[0.9] * depth)
            plan.observe_committed(Stub(), shallow, [*shallow.tokens, 9])  # type: ignore[arg-type]
    assert plan.budget(1).depth == 8


def test_nodes_that_were_left_out_can_come_back() -> None:
    """The steep price keeps a drafter out after many wrong rounds; being right, though unverified, brings it back."""
    curve = CostCurve((1, 2, 3, 4), (1.0, 1.5, 2.0, 2.5))
    plan = Planner(SpeculativeConfig(num_speculative_tokens=4), ChaosDrafter(), Calibrator(), ForwardPrice(curve))
    tree = DraftTree([3, 4], [-1, 0], [0.9, 0.9], sources=[("x",), ("x",)])
    for _ in range(200):
        plan.observe_committed(Stub(), tree, [9])  # type: ignore[arg-type]
    assert len(plan.select([Stub()], [tree])[0]) == 0  # type: ignore[list-item]
    for _ in range(200):
        plan.observe_committed(Stub(), tree, [3, 4, 9])  # type: ignore[arg-type]
    assert len(plan.select([Stub()], [tree])[0]) == 2  # type: ignore[list-item]


def test_a_dear_drafter_that_is_right_keeps_its_depth() -> None:
    plan = planner([1.0] * 32, nodes=8)
    tree = chain(0.9, 0.9, 0.9, 0.9)
    for _ in range(100):
        plan.observe_draft([tree], 0.4)
        plan.observe_committed(Stub(), tree, [*tree.tokens, 9])  # type: ignore[arg-type]
    assert plan.budget(1).depth == 8


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
