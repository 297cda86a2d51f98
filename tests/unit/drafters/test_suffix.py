"""Suffix decoding over one request, and over a tenant's earlier ones."""

from __future__ import annotations

import pytest

from outrider.core.tree import ROOT
from outrider.drafters import suffix
from outrider.drafters.base import Budget, Drafter
from outrider.drafters.suffix import SuffixDrafter
from tests.unit.drafters.simulation import commit, context, make, make_view


def _finish(drafter: Drafter, prompt: list[int], output: list[int], request: int, tenant: str = "default") -> None:
    view = make_view(prompt, request, tenant=tenant)
    drafter.open(view)
    commit(view, output)
    drafter.close(view)


def test_it_follows_the_longest_context() -> None:
    # After "7" came 9 twice, but after "5 6 7" it was 8.
    view = make_view([5, 6, 7, 8, 4, 7, 9, 3, 7, 9, 3, 5, 6, 7])
    tree = make("suffix").propose([view], Budget(3, 3))[0]
    assert list(tree.tokens) == [8, 4, 7]


def test_counts_decide_between_branches() -> None:
    view = make_view([5, 8, 5, 9, 5, 9, 5, 9, 5])
    drafter = make("suffix", suffix_decoding_max_tree_depth=1, suffix_decoding_min_token_prob=0.05)
    tree = drafter.propose([view], Budget(8, 1))[0]
    # Four occurrences of "5" with something after it; after one token of context, each follower is discounted by 0.75.
    assert list(zip(tree.tokens, tree.scores, strict=True)) == [(9, 2.25 / 4), (8, 0.25 / 4)]


def test_longer_contexts_are_believed_more() -> None:
    short = make("suffix").propose([make_view([6, 8, 4, 6])], Budget(1, 1))[0]
    long = make("suffix").propose([make_view([5, 7, 6, 8, 4, 5, 7, 6])], Budget(1, 1))[0]
    assert (short.scores[0], long.scores[0]) == (pytest.approx(1 / 4), pytest.approx(1 - 1.5 / 4))


def test_improbable_paths_are_not_drafted() -> None:
    view = make_view([6, 8, 4, 6])
    unlikely = make("suffix", suffix_decoding_min_token_prob=0.4).propose([view], Budget(8, 8))[0]
    assert len(unlikely) == 0
    assert len(make("suffix", suffix_decoding_min_token_prob=0.0).propose([view], Budget(8, 8))[0]) > 0


def test_a_periodic_end_goes_on() -> None:
    view = make_view([5, 6, 7] * 4)
    tree = make("suffix").propose([view], Budget(16, 16))[0]
    assert list(tree.tokens)[:12] == [5, 6, 7] * 4


def test_earlier_answers_of_the_tenant_are_drafted_from() -> None:
    drafter = make("suffix")
    _finish(drafter, [3, 4], [10, 11, 12, 13], request=0)
    same = make_view([9, 3, 4], 1)
    other = make_view([9, 3, 4], 2, tenant="other")
    mine, theirs = drafter.propose([same, other], Budget(4, 4))
    assert list(mine.tokens) == [10, 11, 12, 13]
    assert len(theirs) == 0


def test_prompts_are_not_remembered_beyond_their_end() -> None:
    drafter = make("suffix", suffix_decoding_max_tree_depth=2)
    _finish(drafter, [20, 21, 22, 23, 24], [25], request=0)
    assert len(drafter.propose([make_view([20, 21], 1)], Budget(4, 4))[0]) == 0
    assert list(drafter.propose([make_view([9, 24], 2)], Budget(4, 4))[0].tokens) == [25]


def test_a_draft_never_runs_from_one_request_into_the_next() -> None:
    drafter = make("suffix")
    _finish(drafter, [3, 4], [10, 11], request=0)
    _finish(drafter, [13, 14], [15, 16], request=1)
    tree = drafter.propose([make_view([9, 3, 4], 2)], Budget(8, 8))[0]
    assert list(tree.tokens) == [10, 11]


def test_memory_of_requests_is_bounded_and_the_oldest_goes_first() -> None:
    drafter = make("suffix", suffix_decoding_max_cached_requests=2)
    for request in range(3):
        _finish(drafter, [3], [10 + request, 20 + request], request)
    found = [drafter.propose([make_view([10 + i], 10 + i)], Budget(1, 1))[0] for i in range(3)]
    assert [list(tree.tokens) for tree in found] == [[], [21], [22]]


def test_memory_of_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_CACHED_TOKENS", 10)
    drafter = SuffixDrafter(context(method="suffix"))
    for request in range(20):
        _finish(drafter, [3], [4, 5, 6, 7], request)
        assert drafter._earlier.get("default").num_tokens <= 10
    _finish(drafter, [3], [8] * 50, 99)
    assert drafter._earlier.get("default").num_tokens == 10


def test_without_memory_nothing_is_kept() -> None:
    drafter = make("suffix", suffix_decoding_max_cached_requests=0)
    _finish(drafter, [3, 4], [10, 11], request=0)
    assert len(drafter.propose([make_view([3, 4], 1)], Budget(4, 4))[0]) == 0


def test_a_request_without_output_is_not_remembered() -> None:
    drafter = make("suffix")
    _finish(drafter, [3, 4, 5], [], request=0)
    assert len(drafter.propose([make_view([3, 4], 1)], Budget(4, 4))[0]) == 0


def test_own_text_and_memory_are_joined_in_one_tree() -> None:
    drafter = make("suffix")
    _finish(drafter, [3, 4], [10], request=0)
    tree = drafter.propose([make_view([3, 4, 11, 3, 4], 1)], Budget(4, 1))[0]
    assert sorted(tree.tokens[node] for node in tree.children()[ROOT]) == [10, 11]
