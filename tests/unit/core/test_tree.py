"""The draft tree: its shape, its promises, and merging."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import DraftError
from outrider.core.tree import ROOT, DraftTree, merge

VOCAB = 6


def uniform_row() -> torch.Tensor:
    return torch.full((VOCAB,), -math.log(VOCAB))


@st.composite
def trees(draw: st.DrawFn, source: str = "a") -> DraftTree:
    """Any tree that keeps the promises of the class."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 10))):
        parent = draw(st.integers(ROOT, node - 1))
        taken = {tokens[i] for i in range(node) if parents[i] == parent}
        token = draw(st.integers(0, VOCAB - 1))
        if token in taken:
            parent, taken = node - 1, set()
        tokens.append(token)
        parents.append(parent)
    scores = draw(st.lists(st.floats(0, 1), min_size=len(tokens), max_size=len(tokens)))
    inner = sorted(set(parents))
    logprobs = {node: uniform_row() for node in inner if draw(st.booleans())}
    return DraftTree(tokens, parents, scores, logprobs, [(source,)] * len(tokens))


def paths(tree: DraftTree) -> dict[tuple[int, ...], int]:
    """Every path of tokens in the tree, and the node at its end."""
    return {tuple(tree.tokens[i] for i in tree.path(node)): node for node in range(len(tree))}


TREE = DraftTree(
    tokens=[4, 5, 1, 2, 3], parents=[ROOT, ROOT, 0, 0, 2], scores=[0.5] * 5, logprobs={ROOT: uniform_row()}
)


def test_shape() -> None:
    assert TREE.children() == {ROOT: [0, 1], 0: [2, 3], 2: [4]}
    assert TREE.depths() == [1, 1, 2, 2, 3]
    assert TREE.path(4) == [0, 2, 4]
    assert TREE.path(ROOT) == []
    assert not TREE.is_chain()
    assert DraftTree().is_chain()
    TREE.check(VOCAB)
    DraftTree().check(VOCAB)


def test_a_chain_is_a_tree_with_one_path() -> None:
    rows = [uniform_row(), uniform_row()]
    chain = DraftTree.chain([3, 3], logprobs=rows)
    assert chain.is_chain()
    assert list(chain.parents) == [ROOT, 0]
    assert chain.logprobs[ROOT] is rows[0]
    assert chain.logprobs[0] is rows[1]
    chain.check(VOCAB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [4, 5, 1, 2, VOCAB]}, "outside the target's vocabulary"),
        ({"tokens": [4, 5, 1, 2, -1]}, "outside the target's vocabulary"),
        ({"tokens": [4, 4, 1, 2, 3]}, "two children of draft node -1 hold token 4"),
        ({"parents": [ROOT, ROOT, 0, 0, 4]}, "parents come before"),
        ({"parents": [ROOT, ROOT, 0, 0, -2]}, "parents come before"),
        ({"scores": [0.5] * 4}, "different lengths"),
        ({"scores": [0.5] * 4 + [math.nan]}, "score nan"),
        ({"scores": [0.5] * 4 + [1.5]}, "score 1.5"),
        ({"sources": [("a",)]}, "different lengths"),
        ({"logprobs": {ROOT: torch.zeros(VOCAB + 1)}}, "have shape"),
        ({"logprobs": {5: uniform_row()}}, "have shape"),
        ({"logprobs": {ROOT: torch.full((VOCAB,), 5.0)}}, "not to 1"),
        ({"logprobs": {ROOT: torch.full((VOCAB,), math.nan)}}, "add up to nan"),
        ({"logprobs": {0: torch.tensor([0.2, 0, 0.2, 0.2, 0.2, 0.2]).log()}}, "drawn with probability zero"),
    ],
)
def test_broken_promises_are_named(change: dict, message: str) -> None:
    with pytest.raises(DraftError, match=message):
        replace(TREE, **change).check(VOCAB)


@settings(deadline=None)
@given(trees(), st.sets(st.integers(0, 9)))
def test_keep_drops_whole_subtrees_and_renumbers(tree: DraftTree, wanted: set[int]) -> None:
    kept = tree.keep(wanted)
    kept.check(VOCAB)
    expected = {p: node for p, node in paths(tree).items() if set(tree.path(node)) <= wanted}
    assert paths(kept).keys() == expected.keys()
    for path, node in paths(kept).items():
        assert kept.scores[node] == tree.scores[expected[path]]
        assert (node in kept.logprobs) == (expected[path] in tree.logprobs)


@settings(deadline=None)
@given(trees("a"), trees("b"), trees("c"))
def test_merge_holds_every_path_once(a: DraftTree, b: DraftTree, c: DraftTree) -> None:
    whole = merge([a, b, c])
    whole.check(VOCAB)
    assert paths(whole).keys() == paths(a).keys() | paths(b).keys() | paths(c).keys()
    assert len(paths(whole)) == len(whole)
    for path, node in paths(whole).items():
        holders = [tree for tree in (a, b, c) if path in paths(tree)]
        assert whole.scores[node] == max(tree.scores[paths(tree)[path]] for tree in holders)
        assert whole.sources[node] == tuple(tree.sources[paths(tree)[path]][0] for tree in holders)


@settings(deadline=None)
@given(trees("a"), trees("b"))
def test_merge_keeps_a_distribution_only_where_all_children_came_from_it(a: DraftTree, b: DraftTree) -> None:
    whole = merge([a, b])
    for path, node in {(): ROOT, **paths(whole)}.items():
        nodes = [(tree, {(): ROOT, **paths(tree)}.get(path)) for tree in (a, b)]
        proposers = [(tree, at) for tree, at in nodes if at is not None and at in tree.children()]
        if len(proposers) > 1:
            assert node not in whole.logprobs
        elif proposers:
            assert (node in whole.logprobs) == (proposers[0][1] in proposers[0][0].logprobs)


@settings(deadline=None)
@given(trees())
def test_merging_a_tree_with_nothing_changes_no_path(tree: DraftTree) -> None:
    whole = merge([DraftTree(), tree])
    assert (list(whole.tokens), list(whole.parents)) == (list(tree.tokens), list(tree.parents))
    assert whole.logprobs.keys() == tree.logprobs.keys()


BACKED = replace(TREE, support=frozenset({0, 2}), support_worth=0.7)


def test_a_support_is_kept_as_a_whole_or_not_at_all() -> None:
    whole = BACKED.keep({0, 2, 3})
    assert [whole.tokens[node] for node in sorted(whole.support)] == [4, 1]
    assert whole.support_worth == 0.7
    part = BACKED.keep({0, 1, 3})
    assert list(part.tokens) == [4, 5, 2]
    assert (part.support, part.support_worth) == (frozenset(), 0.0)


def test_merging_joins_supports_and_adds_up_their_worth() -> None:
    """Nodes that both have are forwarded once; numbers are those of the merged tree."""
    other = DraftTree([5, 3], [ROOT, 0], [0.5, 0.5], support=frozenset({0, 1}), support_worth=0.5)
    whole = merge([BACKED, other])
    whole.check(VOCAB)
    assert {tuple(whole.tokens[i] for i in whole.path(node)) for node in whole.support} == {(4,), (4, 1), (5,), (5, 3)}
    assert whole.support_worth == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("support", "worth", "reason"),
    [
        ({2}, 0.0, "is support and its parent 0 is not"),
        ({0, 5}, 0.0, "has node 5, of 5"),
        ({-1}, 0.0, "has node -1"),
        ({0}, -0.1, "is worth -0.1"),
        ({0}, math.nan, "is worth nan"),
    ],
)
def test_a_broken_support_is_refused(support: set[int], worth: float, reason: str) -> None:
    with pytest.raises(DraftError, match=reason):
        replace(TREE, support=frozenset(support), support_worth=worth).check(VOCAB)
