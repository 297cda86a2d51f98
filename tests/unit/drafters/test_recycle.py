"""Token Recycling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters import recycle
from outrider.drafters.base import Budget, Drafter, Observation, SequenceView
from tests.unit.drafters.simulation import make, make_view


def _teach(
    drafter: Drafter, view: SequenceView, rows: Mapping[int, Sequence[tuple[int, float]]], path: Sequence[int] = (0,)
) -> None:
    """One observation: for the token of each row, the target's candidates and their probabilities."""
    ids = torch.tensor([[token for token, _ in candidates] for candidates in rows.values()])
    logprobs = torch.tensor([[probability for _, probability in candidates] for candidates in rows.values()]).log()
    drafter.observe([Observation(view, [9], list(rows), path, DraftTree(), top_ids=ids, top_logprobs=logprobs)])


def test_it_lays_out_the_candidates_best_path_first() -> None:
    drafter, view = make("recycle"), make_view([3, 5])
    _teach(drafter, view, {5: [(6, 0.8), (7, 0.2)], 6: [(8, 0.5), (10, 0.1)], 7: [(11, 0.9), (12, 0.1)]})
    tree = drafter.propose([view], Budget(4, 3))[0]
    assert list(zip(tree.parents, tree.tokens, strict=True)) == [(ROOT, 6), (0, 8), (ROOT, 7), (2, 11)]
    assert list(tree.scores) == pytest.approx([0.8, 0.5, 0.2, 0.9])


def test_rejected_rows_teach_too() -> None:
    drafter, view = make("recycle"), make_view([3, 5])
    _teach(drafter, view, {5: [(6, 0.8)], 7: [(8, 0.5)]}, path=[0])
    assert list(drafter.propose([make_view([3, 7], 1)], Budget(4, 1))[0].tokens) == [8]


def test_the_accepted_context_has_the_last_word() -> None:
    drafter, view = make("recycle"), make_view([3, 5])
    rows, ids = [5, 6, 6], torch.tensor([[6], [10], [11]])
    drafter.observe(
        [Observation(view, [6, 10], rows, [0, 1], top_ids=ids, top_logprobs=torch.zeros(3, 1))],
    )
    assert list(drafter.propose([make_view([3, 6], 1)], Budget(1, 1))[0].tokens) == [10]


def test_later_rounds_replace_earlier_ones() -> None:
    drafter, view = make("recycle"), make_view([3, 5])
    _teach(drafter, view, {5: [(6, 0.8)]})
    _teach(drafter, view, {5: [(7, 0.6)]})
    assert list(drafter.propose([view], Budget(4, 1))[0].tokens) == [7]


def test_a_new_tenant_starts_from_the_bigrams_of_its_prompt() -> None:
    drafter = make("recycle")
    view = make_view([5, 6, 5, 6, 5, 7, 5])
    drafter.open(view)
    tree = drafter.propose([view], Budget(2, 1))[0]
    assert list(zip(tree.tokens, tree.scores, strict=True)) == [(6, 2 / 4), (7, 1 / 4)]
    _teach(drafter, view, {5: [(8, 0.9)]})
    assert list(drafter.propose([view], Budget(1, 1))[0].tokens) == [8]


def test_the_table_is_bounded_and_the_stalest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycle, "MAX_TOKENS", 3)
    drafter, view = make("recycle"), make_view([3, 5])
    for token in (5, 6, 7):
        _teach(drafter, view, {token: [(10, 0.5)]})
    _teach(drafter, view, {5: [(11, 0.5)]})
    _teach(drafter, view, {8: [(12, 0.5)]})
    known = [len(drafter.propose([make_view([3, token], token)], Budget(1, 1))[0]) for token in (5, 6, 7, 8)]
    assert known == [1, 0, 1, 1]
