"""Lookahead decoding: the window, the pool, the branch, and what they come to in the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from outrider.core.config import SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView
from outrider.drafters.lookahead import LookaheadDrafter
from outrider.drafters.lookahead_pool import MAX_FIRST_TOKENS, MAX_TAILS, NgramPool, Origin
from outrider.drafters.lookahead_window import Window
from outrider.engine.request import trim
from outrider.executors.base import CostCurve
from tests.support.fakes import EOS, VOCAB, FakeExecutor, OpenFake, fake_model, make_engine, run
from tests.unit.drafters.simulation import commit, make, make_view

CYCLE = 3
BUDGET = Budget(100, 50)


def cyclic(history: Sequence[int]) -> torch.Tensor:
    """A language with one word after each, which comes back to the first after all of them."""
    logits = torch.zeros(VOCAB)
    logits[CYCLE + (history[-1] + 7 - CYCLE) % (VOCAB - CYCLE)] = 9.0
    return logits


TEXT = random.Random(4).choices(range(3, VOCAB), k=500)


def by_position(history: Sequence[int]) -> torch.Tensor:
    """A text that is known from the position alone, so that a guess is right only at the position it was made for."""
    logits = torch.zeros(VOCAB)
    logits[TEXT[len(history)]] = 9.0
    return logits


def played(drafter: Drafter, view: SequenceView, logits: Callable[[Sequence[int]], torch.Tensor], rounds: int) -> int:
    """Greedy rounds of one request, all that is drafted being verified. Returns the number of committed tokens."""
    before = len(view.tokens)
    for _ in range(rounds):
        tree = drafter.propose([view], BUDGET)[0]
        drafter.observe([verified(view, tree, logits)])
    return len(view.tokens) - before


def verified(view: SequenceView, tree: DraftTree, logits: Callable[[Sequence[int]], torch.Tensor]) -> Observation:
    paths = [[], *([tree.tokens[node] for node in tree.path(last)] for last in range(len(tree)))]
    histories = [[*view.tokens, *path] for path in paths]
    own = torch.stack([logits(history) for history in histories])
    rows = [view.tokens[-1], *tree.tokens]
    path, committed = [0], [int(own[0].argmax())]
    children = tree.children()
    while below := [n for n in children.get(path[-1] - 1, ()) if tree.tokens[n] == committed[-1]]:
        path.append(below[0] + 1)
        committed.append(int(own[path[-1]].argmax()))
    commit(view, committed)
    top = own.log_softmax(-1).topk(1)
    return Observation(view, committed, rows, path, tree, top_ids=top.indices, top_logprobs=top.values)


# -- the window --------------------------------------------------------------------------------------------------------


def test_a_trajectory_moves_on_by_one_guess_and_one_position() -> None:
    window = Window(3, 3, [5, 6, 7, 8], frozenset())
    before = window.paths()
    ngrams = window.advance(9, [20, 21, 22])
    assert [ngram[-1] for ngram in ngrams] == [20, 21, 22]
    assert ngrams[0] == (9, *before[0], 20), "the root stands in for the first trajectory's oldest guess"
    window.shift([5, 6, 7, 8, 9], 0)
    after = window.paths()
    assert after[0] == (before[0][-1], 20)
    assert after[1][-2:] == (before[1][-1], 21)
    assert after[2][-2:] == (before[2][-1], 22)
    assert after[2][:2] == (ngrams[1][1], ngrams[2][1]), "the oldest guesses of all are the context of the later ones"


def test_the_text_overtakes_trajectories() -> None:
    window = Window(3, 2, [5], frozenset())
    window.advance(5, [20, 21, 22])
    window.shift([5, 6, 7], 2)
    assert window.paths()[0] == (22,)
    assert len(window.paths()) == 3
    window.shift([5, 6, 7], 9)
    assert window.paths()[0] != (22,)


def test_an_end_token_is_never_guessed() -> None:
    window = Window(2, 3, [EOS, EOS], frozenset({EOS}))
    window.advance(5, [EOS, EOS])
    window.shift([EOS, 5], 0)
    assert all(EOS not in path for path in window.paths())


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_guess_stays_at_the_position_that_it_was_made_for(length: int) -> None:
    """Against a target that knows its text by position alone, whatever number of tokens each round commits."""
    chance = random.Random(0)
    unknown, root, right = 99, 1, 0
    window = Window(6, length, [unknown], frozenset())
    for _ in range(60):
        for path in window.paths():
            known = [(token, TEXT[root + 1 + at]) for at, token in enumerate(path) if token != unknown]
            assert all(token == truth for token, truth in known)
            right += len(known)
        window.advance(TEXT[root], [TEXT[root + 1 + len(path)] for path in window.paths()])
        committed = chance.randint(1, 4)
        root += committed
        window.shift([unknown], committed - 1)
    assert right > 60


@pytest.mark.parametrize("size", [3, 4])
def test_the_branch_is_in_step_with_what_was_committed(size: int) -> None:
    """The same through the drafter: a good part of its branch is right; of one that is off by one, next to nothing."""
    drafter = make("lookahead", lookahead_window_size=6, lookahead_ngram_size=size)
    view = make_view([5, 6], room=400)
    right = forwarded = 0
    for _ in range(40):
        tree = drafter.propose([view], BUDGET)[0]
        depths, root = tree.depths(), len(view.tokens) - 1
        right += sum(tree.tokens[node] == TEXT[root + depths[node]] for node in tree.support)
        forwarded += len(tree.support)
        drafter.observe([verified(view, tree, by_position)])
    assert right > 0.3 * forwarded > 0


# -- the pool ----------------------------------------------------------------------------------------------------------


def tokens(pool: NgramPool, context: Sequence[int]) -> list[int]:
    return [found.token for found in pool.continuations(context)]


def test_longer_matches_come_first_and_then_later_ones() -> None:
    pool = NgramPool(3)
    pool.extend([4, 5, 6, 3, 5, 7, 3, 5, 8])
    assert tokens(pool, [4, 5]) == [6, 8, 7]
    assert tokens(pool, [9, 5]) == [8, 7, 6]
    assert tokens(pool, [9]) == []


def test_what_was_said_last_can_be_copied_at_once() -> None:
    pool = NgramPool(5)
    pool.extend([4, 5, 4])
    assert tokens(pool, [5, 4]) == [5]
    pool.extend([4, 5, 4, 5])
    assert tokens(pool, [4, 5]) == [4]


def test_an_ngram_is_from_the_nearest_place_that_has_it() -> None:
    pool = NgramPool(3)

    def origins() -> list[Origin]:
        return [found.origin for found in pool.continuations([4, 5])]

    pool.add_guess([4, 5, 6], Origin.BRANCH)
    assert origins() == [Origin.BRANCH]
    pool.add_guess([4, 5, 6], Origin.ROW)
    assert origins() == [Origin.ROW]
    pool.extend([4, 5, 6])
    pool.add_guess([4, 5, 6], Origin.BRANCH)
    assert origins() == [Origin.TEXT]


def test_a_guess_is_known_by_its_last_tokens_too() -> None:
    pool = NgramPool(4)
    pool.add_guess([4, 5, 6, 7], Origin.BRANCH)
    assert tokens(pool, [3, 6]) == [7]
    assert tokens(pool, [3, 5, 6]) == [7]


@pytest.mark.parametrize("chunk", [1, 2, 5, 40])
def test_it_does_not_matter_how_the_text_came(chunk: int) -> None:
    text = random.Random(1).choices(range(3, 9), k=40)
    whole, pool = NgramPool(4), NgramPool(4)
    whole.extend(text)
    for end in range(chunk, 41, chunk):
        pool.extend(text[:end])
    for at in range(1, 40):
        assert tokens(pool, text[:at])[:1] == tokens(whole, text[:at])[:1]


def test_the_pool_is_bounded_and_the_stalest_goes_first() -> None:
    pool = NgramPool(2)
    for token in range(MAX_TAILS + 1):
        pool.add([7, 100 + token])
    assert sorted(tokens(pool, [7])) == list(range(101, 101 + MAX_TAILS))
    for first in range(1000, 1000 + MAX_FIRST_TOKENS):
        pool.add([first, 1])
    assert tokens(pool, [7]) == []
    assert tokens(pool, [1000]) == [1]


# -- drafting ----------------------------------------------------------------------------------------------------------


def test_the_branch_is_the_support_and_has_its_rows() -> None:
    drafter = make("lookahead", lookahead_window_size=3, lookahead_ngram_size=3)
    tree = drafter.propose([make_view([5, 6, 7, 8])], Budget(24, 24))[0]
    tree.check(VOCAB)
    assert 3 <= len(tree.support) <= 3 * 2 - 1
    assert tree.support_worth > 0


@pytest.mark.parametrize(("nodes", "depth", "width"), [(6, 24, None), (24, 3, None), (24, 24, 1)])
def test_there_is_no_branch_without_a_place_for_it(nodes: int, depth: int, width: int | None) -> None:
    drafter = make("lookahead", lookahead_window_size=4, lookahead_ngram_size=4, tree_width=width)
    view = make_view([5, 6, 7, 5])
    tree = drafter.propose([view], Budget(nodes, depth))[0]
    assert not tree.support
    assert list(tree.tokens)[:2] == [6, 7]


def test_prompts_are_in_the_pool_from_the_start() -> None:
    drafter = make("lookahead", lookahead_window_size=0, lookahead_ngram_size=3)
    tree = drafter.propose([make_view([5, 6, 7, 8, 9, 5, 6])], Budget(3, 3))[0]
    assert (list(tree.tokens), list(tree.parents)) == ([7, 8, 9], [ROOT, 0, 1]), "one n-gram goes on from another"


def test_no_more_ngrams_than_asked_for() -> None:
    view = make_view([5, 6, 5, 7, 5, 8, 5, 9, 5])
    for most in (0, 1, 3):
        drafter = make("lookahead", lookahead_window_size=0, lookahead_verification_set_size=most)
        tree = drafter.propose([view], Budget(16, 8))[0]
        assert sum(node not in tree.parents for node in range(len(tree))) == most


def test_the_branch_finds_what_the_text_has_not_said() -> None:
    """A language of which the prompt holds all words and no two that follow each other: a text tells it once through.

    The branch has met every word within a few rounds, and from then on whole windows are accepted.
    """
    drafters = [make("lookahead", lookahead_window_size=width, lookahead_ngram_size=4) for width in (0, 8)]
    alone, with_branch = (
        [played(drafter, view, cyclic, 1) for _ in range(10)]
        for drafter in drafters
        for view in [make_view(list(range(CYCLE, VOCAB)), room=400)]
    )
    assert sum(with_branch) > 2 * sum(alone), (alone, with_branch)
    assert sum(with_branch[5:]) > 2 * sum(with_branch[:5])


# -- in the engine -----------------------------------------------------------------------------------------------------


class Noting(LookaheadDrafter):
    """Notes the rows that each round forwarded for the branch."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.support: list[int] = []

    def observe(self, observations: Sequence[Observation]) -> None:
        self.support += [len(observation.tree.support) for observation in observations]
        super().observe(observations)


def forwarded(seconds_a_row: float) -> list[int]:
    """Support rows of each round of one request whose text repeats nothing."""
    config = SpeculativeConfig(method="lookahead", lookahead_window_size=3, lookahead_ngram_size=3)
    drafter = Noting(DrafterContext(config, fake_model(), OpenFake()))
    rows = tuple(range(1, 40))
    price = CostCurve(rows, tuple(1.0 + seconds_a_row * (n - 1) for n in rows))
    engine = make_engine(drafter, config=config, executor=FakeExecutor(by_position), price=price)
    run(engine, [engine.add([5, 6, 7], SamplingParams(max_tokens=120, ignore_eos=True))])
    return drafter.support


def test_the_planner_lets_rows_through_that_will_not_be_accepted() -> None:
    support = forwarded(0.0)
    assert sum(map(bool, support)) > 0.6 * len(support)


def test_the_planner_leaves_out_a_branch_that_costs_more_than_it_brings() -> None:
    assert sum(map(bool, forwarded(2.0))) <= 2


def test_a_rule_that_judges_chains_gets_the_best_ngram() -> None:
    """Of a tree it gets every first child; so the branch must come after the n-grams."""
    drafter = make("lookahead", lookahead_window_size=3, lookahead_ngram_size=4)
    view = make_view([5, 6, 7, 8, 9, 5])
    tree = drafter.propose([view], Budget(24, 24))[0]
    assert tree.support
    chain = trim(tree, view.room, view.sampling.end_ids, chain=True)
    assert list(chain.tokens)[:3] == [6, 7, 8]
    assert not chain.support
