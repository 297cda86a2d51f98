"""Growing a tree best path first."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget
from outrider.drafters.calibration import path_products
from outrider.drafters.growth import Limits, grow
from tests.unit.drafters.simulation import make_view

Table = dict[tuple[int, ...], list[tuple[int, float]]]


def _random_table(seed: int, branching: int = 3, depth: int = 4) -> Table:
    chance = random.Random(seed)
    table: Table = {}
    for length in range(depth):
        for path in itertools.product(range(branching), repeat=length):
            scores = sorted((chance.random() for _ in range(branching)), reverse=True)
            table[path] = list(zip(chance.sample(range(branching), branching), scores, strict=True))
    return table


def _grow(table: Table, nodes: int, depth: int, **options: float) -> DraftTree:
    def expand(path: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        return [(token, score, (*path, token)) for token, score in table.get(path, [])]

    return grow((), expand, Limits(nodes, depth, frozenset()), **options)  # type: ignore[arg-type]


def _products(tree: DraftTree) -> list[float]:
    return path_products(tree.parents, tree.scores)


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_the_best_nodes_there_are(seed: int) -> None:
    table = _random_table(seed)
    everything = _products(_grow(table, nodes=10_000, depth=3))
    tree = _grow(table, nodes=7, depth=3)
    tree.check(vocab_size=3)
    assert len(everything) == 3 + 9 + 27
    assert sorted(_products(tree)) == sorted(everything)[-7:]


def test_siblings_come_best_first() -> None:
    tree = _grow(_random_table(1), nodes=20, depth=4)
    for children in tree.children().values():
        scores = [tree.scores[node] for node in children]
        assert scores == sorted(scores, reverse=True)


def test_width_and_floor_cut() -> None:
    table: Table = {(): [(0, 0.6), (1, 0.3), (2, 0.1)], (0,): [(1, 0.5), (2, 0.4)]}
    assert list(_grow(table, 9, 9, width=1).tokens) == [0, 1]
    floored = _grow(table, 9, 9, floor=0.29)
    assert sorted(zip(floored.parents, floored.tokens, strict=True)) == [(ROOT, 0), (ROOT, 1), (0, 1)]


def test_the_floor_of_the_limits_cuts_too() -> None:
    table: Table = {(): [(0, 0.6), (1, 0.3), (2, 0.1)], (0,): [(1, 0.5), (2, 0.4)]}

    def expand(path: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        return [(token, score, (*path, token)) for token, score in table.get(path, [])]

    limits = Limits.of(make_view([5, 6]), Budget(9, 9, least_chance=0.29))
    assert sorted(grow((), expand, limits).tokens) == sorted(_grow(table, 9, 9, floor=0.29).tokens) == [0, 1, 1]
    assert len(grow((), expand, limits, floor=0.5)) == 1


def test_limits_are_the_smaller_of_budget_and_room() -> None:
    view = make_view([5, 6], room=3)
    assert Limits.of(view, Budget(8, 9)) == Limits(8, 3, view.sampling.end_ids)
    assert Limits.of(view, Budget(8, 2)).depth == 2
    view.room = 0
    assert Limits.of(view, Budget(8, 2)).nodes == 0
