"""Medusa: heads side by side on one state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.noise import Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, DrafterContext
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.medusa_heads import MedusaHeads
from outrider.engine.outputs import SpeculationStats
from outrider.heads.head import Head
from outrider.models.config import OUTPUT
from tests.support.fake_heads import HEADS, OpenFakeHeads, counting_head, counting_logits, hidden
from tests.support.fakes import VOCAB, FakeExecutor, fake_model, make_engine, run
from tests.support.heads import random_head
from tests.unit.drafters.simulation import Simulation, make_view


def make(head: Head | None = None, **config: object) -> MedusaDrafter:
    context = DrafterContext(SpeculativeConfig(**config), fake_model(), OpenFakeHeads())  # type: ignore[arg-type]
    return MedusaDrafter(context, head or counting_head())


PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, ignore_eos=True, frequency_penalty=0.01),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.4, seed=1),
]


def play(drafter: MedusaDrafter, **config: object) -> list[SpeculationStats]:
    own = SpeculativeConfig(adaptive=False, **config)  # type: ignore[arg-type]
    engine = make_engine(
        drafter,
        config=own,
        executor=FakeExecutor(counting_logits, hidden=hidden, kv_tokens=100),
        engine_config=EngineConfig(prefill_chunk=8, max_batch_size=3),
        model=fake_model(),
    )
    requests = [engine.add([3 + i, 4, 5, 6] * (1 + 4 * i), own) for i, own in enumerate(PARAMS)]
    run(engine, requests)
    assert engine.stats.preemptions > 0
    assert engine.stats.drafter_failures == 0
    return [request.statistics for request in requests]


def test_heads_that_know_what_comes_are_accepted_in_full() -> None:
    """Which they only are if each reads the state of the position that it was meant for, in every round."""
    for statistics in play(make(tree_width=1), num_speculative_tokens=HEADS)[:2]:
        assert statistics.drafted > 20
        assert statistics.accepted == statistics.drafted


@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_that_read_the_position_next_to_it_are_not(shift: int) -> None:
    for statistics in play(make(counting_head(shift), tree_width=1), num_speculative_tokens=HEADS)[:2]:
        assert statistics.accepted == 0


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
def test_every_rule_accepts_what_it_is_offered(rule: str) -> None:
    lossy = {"allow_lossy": True} if rule == "typical" else {}
    width = {"tree_width": 1} if rule == "block" else {}
    for statistics in play(make(**width), acceptance=rule, num_speculative_tokens=12, **lossy):
        assert statistics.accepted > statistics.rounds


def draft(drafter: MedusaDrafter, view, budget: Budget) -> DraftTree:  # type: ignore[no-untyped-def]
    """After a first round of the fake target."""
    simulation = Simulation(drafter, view, seed=1)
    drafter.observe([simulation.settle(DraftTree())])
    return simulation.draft(budget)


def test_children_are_chosen_and_not_drawn() -> None:
    """A tree carries no distribution, whatever the rule: each token is judged with its own p."""
    for stream in (Stream.TARGET, Stream.DRAFT):
        view = make_view([5, 6, 7], temperature=1.0, stream=stream)
        assert not draft(make(), view, Budget(8, 3)).logprobs


def test_nothing_is_drafted_from_the_state_of_an_earlier_round() -> None:
    drafter = make()
    view = make_view([5, 6, 7])
    assert len(draft(drafter, view, Budget(8, 3))) == 8
    view.tokens.append(9)
    assert not len(drafter.propose([view], Budget(8, 3))[0])
    view.tokens.pop()
    drafter.pause(view)
    assert not len(drafter.propose([view], Budget(8, 3))[0])


def test_the_tree_learns_which_candidates_are_right() -> None:
    """Heads that are sure and always wrong by one: the second candidate takes the first one's place, for one tenant."""
    drafter = make(counting_head(1))
    view = make_view([5, 6, 7], room=400, tenant="a")
    simulation = CountingTarget(drafter, view)
    drafter.observe([simulation.settle(DraftTree())])
    before = simulation.draft(Budget(1, 1)).tokens[0]
    assert before != (view.tokens[-1] + 1) % VOCAB
    for _ in range(60):
        simulation.draft(Budget(8, 3))
        drafter.observe([simulation.settle(DraftTree())])
    assert simulation.draft(Budget(1, 1)).tokens[0] == (view.tokens[-1] + 1) % VOCAB
    other = CountingTarget(drafter, make_view([5, 6, 7], 1, tenant="b"))
    drafter.observe([other.settle(DraftTree())])
    assert other.draft(Budget(1, 1)).tokens[0] == before


STATED = ((0.6, 0.25), (0.5, 0.2), (0.45, 0.1))


def test_the_tree_starts_from_the_accuracies_that_the_head_states() -> None:
    """By probability: a .6, aa .3, b .25, aaa .135, ba .125, ab .12; the next would be baa .056 and aba .054."""
    drafter = make(replace(counting_head(), accept_by_rank=STATED), tree_width=2)
    tree = draft(drafter, make_view([5, 6, 7]), Budget(6, 3))
    assert tree.parents == [ROOT, 0, ROOT, 1, 2, 0]
    assert tree.scores == pytest.approx([0.6, 0.5, 0.25, 0.45, 0.5, 0.2])
    assert [tree.tokens[node] for node in (0, 1, 3)] == [9, 10, 11]


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"frequency_penalty": 0.1}, {"banned_token_ids": [30]}])
def test_what_was_measured_of_plain_greedy_text_says_nothing_of_other_text(params: dict[str, object]) -> None:
    silent, stating = (
        draft(make(head, tree_width=2), make_view([5, 6, 7], **params), Budget(6, 3))
        for head in (counting_head(), replace(counting_head(), accept_by_rank=STATED))
    )
    assert silent == stating


class CountingTarget(Simulation):
    """Goes on counting."""

    def _correction(self, logits: torch.Tensor) -> int:
        return (self.view.tokens[-1] + 1) % VOCAB


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("reduced", [True, False])
def test_heads_compute_what_they_are_defined_as(own_output: bool, blocks: int, reduced: bool) -> None:
    from tests.support.models import random_model

    target = random_model("llama", num_layers=2)
    ids = torch.arange(0, target.config.vocab_size, 3) if reduced else None
    head = random_head("medusa", target.config, draft_ids=ids, own_output=own_output, num_blocks=blocks)
    heads = MedusaHeads(head, target, OpenFakeHeads())
    features = torch.randn(4, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    got = heads(features)
    shared = target.weights.tensor(OUTPUT, torch.bfloat16).float()
    for k in range(heads.count):
        x = features
        for i in range(blocks):
            weight, bias = (head.tensors[f"heads.{k}.blocks.{i}.{name}"] for name in ("weight", "bias"))
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        output = head.tensors[f"heads.{k}.output.weight"] if own_output else shared if ids is None else shared[ids]
        assert torch.allclose(got[k], x @ output.T, atol=1e-5)
