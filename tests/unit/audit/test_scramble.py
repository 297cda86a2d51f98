"""Scrambled drafts: odd in every way that the contract allows, and never more than that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider.audit.scramble import Scrambled
from outrider.core.errors import DraftError
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, SequenceView
from tests.support.fake_llm import fake_llm, repetitive_logits, use_fakes
from tests.support.fakes import VOCAB

BUDGET = Budget(nodes=8, depth=5)


class Chains(Drafter):
    """One and the same chain, as long as the budget."""

    name = "chains"

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        depth = min(budget.nodes, budget.depth, *(view.room for view in views))
        return [DraftTree.chain(list(range(3, 3 + depth))) for _ in views]


def view(room: int = 100) -> SequenceView:
    return SequenceView(0, "t", [5, 6], 2, SamplingState(SamplingParams(seed=0), VOCAB, [5, 6], ()), room)


def drafts(seed: int, rounds: int = 200, room: int = 100) -> list[DraftTree]:
    drafter = Scrambled(Chains(), seed)
    return [drafter.propose([view(room)], BUDGET)[0] for _ in range(rounds)]


def test_drafts_keep_the_contract() -> None:
    for tree in drafts(0) + drafts(1, room=3):
        tree.check(VOCAB)
        assert len(tree) <= BUDGET.nodes
        assert max(tree.depths(), default=0) <= BUDGET.depth
    assert max(max(tree.depths(), default=0) for tree in drafts(1, room=3)) == 3


def test_drafts_are_of_every_kind() -> None:
    trees = drafts(0)
    assert {len(tree) for tree in trees} == set(range(BUDGET.nodes + 1))
    assert any(len(tree) > 2 and tree.is_chain() for tree in trees)
    assert any(not tree.is_chain() for tree in trees)
    assert any(3 in tree.tokens and tree.tokens[0] != 3 for tree in trees), "random tokens never come first"


def test_a_seed_repeats_them() -> None:
    def shapes(seed: int) -> list[tuple[list[int], list[int]]]:
        return [(list(tree.tokens), list(tree.parents)) for tree in drafts(seed)]

    assert shapes(3) == shapes(3)
    assert shapes(3) != shapes(4)


def test_drawn_trees_are_left_to_rules_that_can_judge_them() -> None:
    class Drawn(Drafter):
        name = "drawn"

        def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
            return [DraftTree.chain([3], logprobs=[torch.full((VOCAB,), 1 / VOCAB).log()]) for _ in views]

    drafter = Scrambled(Drawn())
    with pytest.raises(DraftError, match="coupled"):
        [drafter.propose([view()], BUDGET) for _ in range(20)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["ngram", "suffix+recycle"])
def test_they_do_not_change_the_text(method: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch, repetitive_logits)
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=1, ignore_eos=True)
    prompts = ["hello hello", "world", "abcabc"]
    plain = fake_llm("none").generate(prompts, params, use_tqdm=False)
    config = {"method": method, "adaptive": False}
    found = fake_llm("none").with_speculation(config, Scrambled).generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    assert sum(output.statistics.accepted for output in found) > 0
    assert sum(output.statistics.failures for output in found) == 0
