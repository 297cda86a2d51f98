"""The layout of trees: sums over spread-out columns are those of each path by itself."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.executors.torch.kv import SequenceKV
from outrider.executors.torch.products import COLUMN_MULTIPLE, Arithmetic, round_up
from outrider.executors.torch.tree import TreeOrder, order_tree

D = 4
CPU = torch.device("cpu")


def random_tree(rng: random.Random, length: int, rows: int) -> SequenceKV:
    seq = SequenceKV(length=length)
    for row in range(rows):
        parent = rng.randrange(-1, row)
        seq.parents.append(parent)
        seq.depths.append(0 if parent < 0 else seq.depths[parent] + 1)
    return seq


def slots_by_position(seq: SequenceKV, row: int) -> list[int]:
    return [*range(seq.length), *(seq.length + ancestor for ancestor in seq.ancestry(row))]


def make(seq: SequenceKV, rows: range, arithmetic: Arithmetic) -> tuple[TreeOrder, int]:
    columns = round_up(seq.length + max(seq.depths) + 2, COLUMN_MULTIPLE)
    return order_tree(seq, rows, columns, arithmetic, CPU), columns


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_scores_weights_and_values_go_where_they_belong(seed: int, group: int) -> None:
    rng = random.Random(seed)
    seq = random_tree(rng, rng.randrange(0, 70), rng.randrange(2, 30))
    rows = range(rng.randrange(0, seq.pending), seq.pending)
    order, columns = make(seq, rows, Arithmetic(rows=1, block=32, group=group))
    slots = round_up(seq.length + seq.pending, COLUMN_MULTIPLE)
    # A score tells its slot, and so does a value.
    scores = torch.arange(slots).float().expand(1, 1, len(rows), slots)
    lined_up = order.line_up(scores)
    assert lined_up.shape[-1] == columns
    values = order.spread_values(torch.arange(slots).float().view(1, slots, 1).expand(1, slots, D))
    for number, row in enumerate(rows):
        own = slots_by_position(seq, row)
        assert lined_up[0, 0, number, : len(own)].tolist() == own
        weights = torch.zeros(1, 1, len(rows), columns)
        weights[0, 0, number, : len(own)] = torch.arange(1, len(own) + 1)
        spread = order.spread_weights(weights)
        assert spread.shape[-1] == values.shape[1] == order.edges[-1]
        assert spread[0, 0, :number].eq(0).all()
        used = spread[0, 0, number].nonzero().flatten()
        assert spread[0, 0, number, used].tolist() == list(range(1, len(own) + 1)), "weights out of order, or lost"
        assert values[0, used, 0].tolist() == own


@pytest.mark.parametrize("seed", range(20))
def test_groups_and_blocks_stay_whole(seed: int) -> None:
    rng = random.Random(seed)
    arithmetic = Arithmetic(rows=1, block=32, group=4)
    seq = random_tree(rng, rng.randrange(0, 70), 30)
    order, columns = make(seq, range(30), arithmetic)
    assert order.start % 4 == 0
    assert all(edge % COLUMN_MULTIPLE == 0 for edge in order.edges)
    places = torch.arange(columns).float().add(1).expand(1, 1, 30, columns)
    for row in range(30):
        own = seq.length + seq.depths[row] + 1
        weights = torch.where(torch.arange(columns) < own, places, 0)
        spread = order.spread_weights(weights)[0, 0, row]
        for column in spread.nonzero().flatten().tolist():
            position = int(spread[column]) - 1
            assert column % 4 == position % 4
            block = position // arithmetic.block
            assert order.edges[block] <= column < order.edges[block + 1]


def test_shared_groups_are_stored_once() -> None:
    """Twenty leaves under one trunk: the trunk's groups appear once."""
    trunk, leaves = 16, 20
    seq = SequenceKV(parents=[*range(-1, trunk - 1), *[trunk - 1] * leaves], depths=[*range(trunk), *[trunk] * leaves])
    order, _ = make(seq, range(trunk + leaves), Arithmetic(rows=1, block=768, group=4))
    assert len(order.sources) == trunk + leaves * 4
