"""Several drafters at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from outrider.core.errors import DraftError
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, Observation, SequenceView, Wants
from outrider.drafters.cascade import Cascade, cut
from tests.support.fakes import VOCAB
from tests.unit.drafters.simulation import commit, make, make_view


class Scripted(Drafter):
    """Proposes the same tree over and over, and notes what it is told."""

    def __init__(self, name: str, tree: DraftTree | Callable[[], DraftTree], wants: Wants | None = None) -> None:
        self.name = name
        self.wants = wants or Wants()
        self._tree = tree
        self.told: list[str] = []

    def open(self, view: SequenceView) -> None:
        self.told.append("open")

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [self._tree() if callable(self._tree) else self._tree for _ in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.told.append("observe")

    def close(self, view: SequenceView) -> None:
        self.told.append("close")


class Broken(Scripted):
    """Raises whatever it is asked."""

    def __init__(self) -> None:
        super().__init__("broken", DraftTree())

    def open(self, view: SequenceView) -> None:
        raise RuntimeError("no")

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        raise RuntimeError("no")

    def observe(self, observations: Sequence[Observation]) -> None:
        raise RuntimeError("no")

    def close(self, view: SequenceView) -> None:
        raise RuntimeError("no")


def _observe(cascade: Cascade, view: SequenceView, tree: DraftTree, committed: list[int]) -> None:
    rows = [view.tokens[-1], *tree.tokens]
    commit(view, committed)
    cascade.observe([Observation(view, committed, rows, [0], tree)])


def test_trees_are_merged_with_their_sources() -> None:
    a = Scripted("a", DraftTree([5, 6], [ROOT, 0], [0.9, 0.8]))
    b = Scripted("b", DraftTree([5, 7], [ROOT, 0], [0.5, 0.4]))
    tree = Cascade([a, b]).propose([make_view([3])], Budget(8, 8))[0]
    assert list(zip(tree.parents, tree.tokens, tree.sources, strict=True)) == [
        (ROOT, 5, ("a", "b")),
        (0, 6, ("a",)),
        (0, 7, ("b",)),
    ]
    assert list(tree.scores) == [0.9, 0.8, 0.4]


def test_the_best_nodes_share_the_budget() -> None:
    a = Scripted("a", DraftTree([5, 6, 7], [ROOT, 0, 1], [0.9, 0.2, 0.9]))
    b = Scripted("b", DraftTree([8, 9, 10], [ROOT, 0, 1], [0.6, 0.9, 0.9]))
    tree = Cascade([a, b]).propose([make_view([3])], Budget(4, 8))[0]
    assert sorted(tree.tokens) == [5, 8, 9, 10]


def test_scores_of_members_become_comparable() -> None:
    boaster = Scripted("boaster", DraftTree([5], [ROOT], [0.95]))
    modest = Scripted("modest", DraftTree([6], [ROOT], [0.3]))
    cascade, view = Cascade([boaster, modest]), make_view([3])
    assert list(cascade.propose([view], Budget(1, 1))[0].tokens) == [5]
    for _ in range(12):
        # What a member proposed counts even where the budget had no place for it.
        _observe(cascade, view, cascade.propose([view], Budget(1, 1))[0], [6])
    assert list(cascade.propose([view], Budget(1, 1))[0].tokens) == [6]


def test_what_one_tenant_teaches_stays_with_it() -> None:
    a = Scripted("a", DraftTree([5], [ROOT], [0.9]))
    b = Scripted("b", DraftTree([6], [ROOT], [0.3]))
    cascade, view = Cascade([a, b]), make_view([3])
    for _ in range(12):
        _observe(cascade, view, cascade.propose([view], Budget(1, 1))[0], [6])
    stranger = make_view([3], 1, tenant="other")
    assert list(cascade.propose([stranger], Budget(1, 1))[0].tokens) == [5]


def test_one_failing_member_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    good = Scripted("good", DraftTree([5], [ROOT], [0.9]))
    cascade, view = Cascade([Broken(), good]), make_view([3])
    with caplog.at_level(logging.WARNING):
        cascade.open(view)
        for _ in range(3):
            tree = cascade.propose([view], Budget(4, 4))[0]
            assert list(tree.tokens) == [5]
            _observe(cascade, view, tree, [5])
        cascade.close(view)
    assert good.told == ["open", "observe", "observe", "observe", "close"]
    assert cascade.failures == {"broken": 8}
    assert len(caplog.records) == 1
    assert "drafter broken failed" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree([VOCAB], [ROOT], [0.5]),
        DraftTree([5], [ROOT], [math.nan]),
        DraftTree([5, 5], [ROOT, ROOT], [0.5, 0.5]),
        DraftTree([5], [0], [0.5]),
    ],
)
def test_a_malformed_tree_is_a_failure_of_its_member(tree: DraftTree) -> None:
    cascade = Cascade([Scripted("bad", tree), Scripted("good", DraftTree([5], [ROOT], [0.9]))])
    assert list(cascade.propose([make_view([3])], Budget(4, 4))[0].tokens) == [5]
    assert cascade.failures == {"bad": 1}


def test_too_few_trees_are_a_failure_too() -> None:
    class Lazy(Scripted):
        def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
            return super().propose(views, budget)[1:]

    cascade = Cascade([Lazy("lazy", DraftTree()), Scripted("good", DraftTree([5], [ROOT], [0.9]))])
    views = [make_view([3], i) for i in range(2)]
    assert [list(tree.tokens) for tree in cascade.propose(views, Budget(4, 4))] == [[5], [5]]
    assert cascade.failures == {"lazy": 1}


def test_if_all_fail_the_cascade_fails_and_recovers() -> None:
    answers = iter([DraftTree([VOCAB], [ROOT], [0.5]), DraftTree([5], [ROOT], [0.5])])
    cascade, view = Cascade([Scripted("a", lambda: next(answers)), Broken()]), make_view([3])
    with pytest.raises(DraftError, match="every drafter of a\\+broken failed"):
        cascade.propose([view], Budget(4, 4))
    assert list(cascade.propose([view], Budget(4, 4))[0].tokens) == [5]


def test_wants_and_defaults_are_combined() -> None:
    a = Scripted("a", DraftTree(), Wants(top_k=8, hidden_layers=(3,)))
    b = Scripted("b", DraftTree(), Wants(top_k=2, hidden_layers=(1, 3)))
    b.default_tokens = 20
    cascade = Cascade([a, b])
    assert cascade.wants == Wants(top_k=8, hidden_layers=(1, 3))
    assert (cascade.name, cascade.default_tokens) == ("a+b", 20)


def test_build_joins_members_once() -> None:
    cascade = make("ngram+auto+suffix")
    assert isinstance(cascade, Cascade)
    assert [member.name for member in cascade.members] == ["ngram", "suffix", "recycle"]


class TestCut:
    """The cut to a budget."""

    tree = DraftTree([5, 6, 7, 8], [ROOT, ROOT, 0, 0], [0.3, 0.9, 0.5, 0.6])

    def test_it_keeps_the_best_paths(self) -> None:
        assert sorted(cut(self.tree, 3).tokens) == [5, 6, 8]

    def test_width_limits_children(self) -> None:
        assert list(cut(self.tree, 4, width=1).tokens) == [6]

    def test_drawn_nodes_are_kept_whatever_they_are_worth(self) -> None:
        tree = DraftTree(self.tree.tokens, self.tree.parents, self.tree.scores, {0: torch.zeros(VOCAB)})
        assert sorted(cut(tree, 3).tokens) == [5, 7, 8]
        assert set(cut(tree, 3).logprobs) == {0}


def test_the_draws_of_a_second_member_are_guesses() -> None:
    """What a rule that compares p with q is told must not depend on which draws the budget has room for."""
    row = torch.full((VOCAB,), 1 / VOCAB).log()
    first = DraftTree([5, 6], [ROOT, 0], [0.1, 0.1], {0: row})
    second = DraftTree([7, 8, 9], [ROOT, 0, 0], [0.9, 0.9, 0.8], {ROOT: row, 0: row})
    tree = Cascade([Scripted("a", first), Scripted("b", second)]).propose([make_view([3])], Budget(4, 4))[0]
    assert len(tree) == 4
    assert {5, 6} < set(tree.tokens)
    assert [tree.tokens[node] for node in tree.logprobs] == [5]


def test_a_tree_beyond_the_budget_is_a_failure_of_its_member() -> None:
    greedy = Scripted("greedy", DraftTree.chain([5, 6, 7]))
    cascade = Cascade([greedy, Scripted("good", DraftTree([8], [ROOT], [0.9]))])
    assert list(cascade.propose([make_view([3])], Budget(2, 2))[0].tokens) == [8]
    assert cascade.failures == {"greedy": 1}


def test_failures_are_told_by_request() -> None:
    class FailsFor(Scripted):
        def take_failures(self) -> Mapping[str, frozenset[int]]:
            return {self.name: frozenset({7})}

    member = FailsFor("partly", DraftTree([5], [ROOT], [0.9]))
    views = [make_view([3], request) for request in (1, 7)]
    assert Cascade([member, Scripted("good", DraftTree())]).take_failures() == {"partly": {7}}
    cascade = Cascade([member, Broken()])
    cascade.propose(views[:1], Budget(4, 4))
    assert cascade.take_failures() == {"partly": {7}, "broken": {1}}
    assert cascade.take_failures() == {"partly": {7}}, "told once"


def _backed() -> DraftTree:
    """A good chain of three, and a support of two that nobody expects to be accepted."""
    return DraftTree(
        [3, 4, 5, 6, 7],
        [ROOT, 0, 1, ROOT, 3],
        [0.9, 0.9, 0.9, 0.01, 0.01],
        support=frozenset({3, 4}),
        support_worth=0.4,
    )


def test_a_cut_leaves_the_support_and_takes_other_nodes() -> None:
    kept = cut(_backed(), 4)
    assert sorted(kept.tokens) == [3, 4, 6, 7]
    assert {kept.tokens[node] for node in kept.support} == {6, 7}


@pytest.mark.parametrize(("nodes", "width", "left"), [(1, None, [3]), (4, 1, [3, 4, 5])])
def test_a_support_that_does_not_fit_is_given_up(nodes: int, width: int | None, left: list[int]) -> None:
    tree = replace(_backed(), parents=[ROOT, 0, 1, ROOT, ROOT]) if width else _backed()
    kept = cut(tree, nodes, width)
    assert (list(kept.tokens), kept.support) == (left, frozenset())


def test_the_support_of_a_member_is_the_cascades() -> None:
    chain = DraftTree.chain([3, 8], [0.8, 0.8])
    cascade = Cascade([Scripted("a", chain), Scripted("b", _backed())])
    tree = cascade.propose([make_view([1, 2])], Budget(5, 5))[0]
    assert {tuple(tree.tokens[i] for i in tree.path(node)) for node in tree.support} == {(6,), (6, 7)}
    assert tree.support_worth == 0.4
