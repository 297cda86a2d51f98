"""EAGLE-2's tree: which nodes are kept, which are expanded, and when growing ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.dynamic_tree import ROWS_PER_LEVEL, DynamicTree
from outrider.drafters.growth import Limits
from outrider.drafters.guesses import Guesses
from tests.unit.drafters.simulation import make_view


def guesses(rows: Sequence[Sequence[float]]) -> Guesses:
    """Candidates 10, 11, … at each node, with these probabilities."""
    logprobs = np.log(np.array(rows, dtype=np.float32))
    ids = np.tile(np.arange(10, 10 + logprobs.shape[1]), (len(rows), 1))
    return Guesses(ids, logprobs, logprobs, logprobs, None)


def grown(
    chances: Sequence[float], depth: int, nodes: int = 99, least: float = 0.0, ratio: float | None = None
) -> tuple[DraftTree, list[int]]:
    """The tree where every node has candidates of these chances, and how many rows each level forwarded."""
    tree = DynamicTree(make_view([3]), Limits(nodes, depth, frozenset(), least), len(chances), ratio)
    tree.expand([ROOT], guesses([chances]))
    rows: list[int] = []
    while frontier := tree.frontier():
        rows.append(len(frontier))
        tree.expand(frontier, guesses([chances] * len(frontier)))
    return tree.tree(), rows


def test_it_goes_as_deep_as_it_may() -> None:
    tree, rows = grown([0.9, 0.05], depth=5)
    assert max(tree.depths()) == 5
    assert rows == [2, 4, 8, ROWS_PER_LEVEL]


def test_nodes_that_cannot_pay_are_left_out() -> None:
    tree, _ = grown([0.6, 0.3, 0.05], depth=3, least=0.1)
    products = [np.prod([tree.scores[n] for n in tree.path(node)]) for node in range(len(tree))]
    assert min(products) > 0.1
    assert len(tree) == sum(a * b * c > 0.1 for a in (0.6, 0.3) for b in (0.6, 0.3) for c in (0.6, 0.3)) + 3 + 2


def test_a_level_must_pay() -> None:
    """A level that takes as long as a round must bring a token where a round brings one: 0.2 of one does not."""
    assert grown([0.2], depth=4, ratio=1.0)[1] == []
    assert grown([0.95], depth=4, ratio=0.05)[1] == [1, 1, 1]


def test_within_a_level_every_row_must_pay() -> None:
    _, all_rows = grown([0.5, 0.2, 0.05, 0.05], depth=2, ratio=None)
    _, paying = grown([0.5, 0.2, 0.05, 0.05], depth=2, ratio=0.12)
    assert all_rows == [4]
    assert paying == [2]


@pytest.mark.parametrize("nodes", [1, 3, 7])
def test_the_best_nodes_are_kept(nodes: int) -> None:
    tree, _ = grown([0.6, 0.3], depth=4, nodes=nodes)
    everything, _ = grown([0.6, 0.3], depth=4)

    def best(of: DraftTree) -> list[float]:
        return sorted((float(np.prod([of.scores[n] for n in of.path(node)])) for node in range(len(of))), reverse=True)

    assert best(tree) == pytest.approx(best(everything)[:nodes])
