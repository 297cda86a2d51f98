"""Prompt lookup."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.tree import ROOT
from outrider.drafters.base import Budget
from outrider.drafters.ngram import NgramIndex
from tests.unit.drafters.simulation import commit, make, make_view


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 3))
def test_the_index_finds_what_a_scan_finds(tokens: list[int], shortest: int, more: int) -> None:
    index = NgramIndex(shortest, shortest + more)
    for end in range(1, len(tokens) + 1):
        index.extend(tokens[:end])
    expected = [
        (at, n)
        for n in range(shortest + more, shortest - 1, -1)
        for at in range(len(tokens) - 1, n - 1, -1)
        if tokens[at - n : at] == tokens[len(tokens) - n :]
    ]
    assert list(index.matches(tokens)) == expected


def test_it_copies_on_from_the_longest_match() -> None:
    # "6 7" was last followed by 9; the longer "5 6 7" was followed by 8.
    view = make_view([5, 6, 7, 8, 3, 6, 7, 9, 4, 5, 6, 7])
    tree = make("ngram").propose([view], Budget(3, 3))[0]
    assert list(tree.tokens) == [8, 3, 6]
    assert tree.is_chain()


def test_it_prefers_the_latest_match() -> None:
    view = make_view([5, 6, 8, 3, 5, 6, 9, 4, 5, 6])
    assert list(make("ngram").propose([view], Budget(2, 2))[0].tokens) == [9, 4]


def test_a_longer_match_is_trusted_more() -> None:
    view = make_view([5, 6, 8, 8, 5, 6])
    scores = make("ngram").propose([view], Budget(3, 3))[0].scores
    assert list(scores) == [2 / 3, 3 / 4, 4 / 5]


def test_a_periodic_end_goes_on_with_its_period() -> None:
    view = make_view([9, 5, 6, 7, 5, 6, 7, 5, 6])
    assert list(make("ngram").propose([view], Budget(8, 8))[0].tokens) == [7, 5, 6, 7, 5, 6, 7, 5]


def test_nothing_is_proposed_without_a_match() -> None:
    assert len(make("ngram").propose([make_view([5, 6, 7, 8])], Budget(8, 8))[0]) == 0
    assert len(make("ngram", prompt_lookup_min=3).propose([make_view([5, 6, 8, 5, 6])], Budget(8, 8))[0]) == 0


def test_earlier_matches_become_branches() -> None:
    view = make_view([5, 6, 8, 3, 5, 6, 9, 4, 5, 6])
    tree = make("ngram", tree_width=2).propose([view], Budget(4, 2))[0]
    assert [tree.tokens[node] for node in tree.children()[ROOT]] == [9, 8]
    assert len(tree) == 4


def test_new_tokens_are_indexed_as_they_come() -> None:
    drafter = make("ngram")
    view = make_view([5, 6, 7])
    assert len(drafter.propose([view], Budget(4, 4))[0]) == 0
    commit(view, [8, 5, 6])
    assert list(drafter.propose([view], Budget(2, 2))[0].tokens) == [7, 8]
