"""One suite over every registered rule, as the engine uses it: a new rule is tested the moment it is registered."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from outrider.acceptance import RULES
from outrider.acceptance.base import AcceptanceRule, Candidate, Verdict
from outrider.core.config import SpeculativeConfig
from outrider.core.errors import NonFiniteLogitsError, UnknownNameError
from outrider.core.gumbel import gumbel_argmax
from outrider.core.noise import Stream
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.core.tree import ROOT, DraftTree
from tests.unit.acceptance.problems import VOCAB, Problem, random_logits, random_problem

SAMPLED = SamplingParams(temperature=1.0, seed=3)


def build(name: str) -> AcceptanceRule:
    return RULES.get(name)(SpeculativeConfig(acceptance=name, allow_lossy=True))


@pytest.fixture(params=RULES.names())
def rule(request: pytest.FixtureRequest) -> AcceptanceRule:
    return build(request.param)


def problem(rule: AcceptanceRule, seed: int, *, drawn: bool = True, params: SamplingParams | None = None) -> Problem:
    stream = rule.draft_stream(2)
    return random_problem(seed, drawn=drawn, width=2 if rule.trees else 1, depth=3, stream=stream, params=params)


def judge(rule: AcceptanceRule, candidate: Candidate) -> Verdict:
    return rule.accept([candidate])[0]


def test_the_name_is_the_registered_one(rule: AcceptanceRule) -> None:
    assert build(rule.name).__class__ is rule.__class__
    assert rule.lossless == (rule.name != "typical")


def test_unknown_rules_name_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rejection'"):
        RULES.get("rejecting")


@pytest.mark.parametrize("drawn", [True, False])
def test_a_verdict_is_a_path_and_a_possible_token(rule: AcceptanceRule, drawn: bool) -> None:
    for seed in range(30):
        case = problem(rule, seed, drawn=drawn)
        verdict = judge(rule, case.candidate)
        for above, below in pairwise((ROOT, *verdict.path)):
            assert case.tree.parents[below] == above
        assert verdict.rows() == [0, *(node + 1 for node in verdict.path)]
        emitted = [*(case.tree.tokens[node] for node in verdict.path), verdict.token]
        assert bool((case.target_probs()[0, verdict.rows(), emitted] > 0).all())


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 2}])
def test_greedy_follows_the_argmax_of_every_node(rule: AcceptanceRule, more: dict) -> None:
    for seed in range(30):
        case = problem(rule, seed, drawn=seed % 2 == 0, params=SamplingParams(seed=1, **more))
        best = case.target_probs()[0].argmax(-1).tolist()
        path: list[int] = []
        for node, (parent, token) in enumerate(zip(case.tree.parents, case.tree.tokens, strict=True)):
            if parent == (path[-1] if path else ROOT) and token == best[parent + 1]:
                path.append(node)
        assert judge(rule, case.candidate) == Verdict(tuple(path), best[path[-1] + 1 if path else 0])


def test_nothing_drafted_is_plain_decoding(rule: AcceptanceRule) -> None:
    logits = random_logits(np.random.default_rng(0), 1)
    for params in (SAMPLED, SamplingParams()):
        verdict = judge(rule, Candidate(DraftTree(), logits, SamplingState(params, VOCAB, [1])))
        assert verdict.path == ()
        assert logits[0, verdict.token] > -math.inf


def test_neighbours_order_and_size_of_the_batch_do_not_matter(rule: AcceptanceRule) -> None:
    candidates = [
        problem(rule, seed, params=SamplingParams(temperature=seed % 3, seed=seed)).candidate for seed in range(40)
    ]
    alone = [judge(rule, candidate) for candidate in candidates]
    assert len({len(verdict.path) for verdict in alone}) > 1
    assert rule.accept(candidates) == alone
    order = np.random.default_rng(0).permutation(40)
    assert rule.accept([candidates[i] for i in order]) == [alone[i] for i in order]
    assert rule.accept([]) == []


def test_judging_changes_nothing(rule: AcceptanceRule) -> None:
    candidate = problem(rule, 5).candidate
    logits, position = candidate.logits.clone(), candidate.sampling.position
    rows = {node: row.clone() for node, row in candidate.tree.logprobs.items()}
    assert judge(rule, candidate) == judge(rule, candidate)
    assert torch.equal(candidate.logits, logits)
    assert candidate.sampling.position == position
    assert all(torch.equal(candidate.tree.logprobs[node], row) for node, row in rows.items())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_is_an_error(rule: AcceptanceRule, temperature: float, broken: float) -> None:
    candidate = problem(rule, 1, params=SamplingParams(temperature=temperature, seed=1)).candidate
    candidate.logits[0, 2] = broken
    with pytest.raises(NonFiniteLogitsError):
        rule.accept([candidate])


def test_rows_off_the_path_are_not_read(rule: AcceptanceRule) -> None:
    """A draft must not be able to end a request that would live without it."""
    if rule.name == "block":
        pytest.skip("block verification judges a token by those after it")
    for seed in range(20):
        candidate = problem(rule, seed).candidate
        verdict = judge(rule, candidate)
        if rule.name == "typical":
            dead = [n for n, p in enumerate(candidate.tree.parents) if p != ROOT][2:]
            dead = [n for n in dead if n not in candidate.tree.parents and n not in verdict.path]
        else:
            dead = [n for n in range(len(candidate.tree)) if n not in verdict.path]
        logits = candidate.logits.clone()
        logits[[n + 1 for n in dead]] = math.nan
        assert judge(rule, replace(candidate, logits=logits)) == verdict


def test_rows_must_fit_the_tree() -> None:
    with pytest.raises(ValueError, match="2 draft nodes need 3 rows, not 2"):
        Candidate(DraftTree.chain([1, 2]), torch.zeros(2, VOCAB), SamplingState(SAMPLED, VOCAB))


def test_a_chain_rule_refuses_trees(rule: AcceptanceRule) -> None:
    if rule.trees:
        pytest.skip("judges trees")
    with pytest.raises(ValueError, match="chains only"):
        rule.accept([random_problem(0, width=2, params=SAMPLED).candidate])


def test_certain_drafts_are_accepted_in_full(rule: AcceptanceRule) -> None:
    """q = p: a drafter that is the target itself loses nothing."""
    for seed in range(50):
        sampling = SamplingState(SamplingParams(temperature=1.0, seed=seed), VOCAB, [1])
        logits = random_logits(np.random.default_rng(seed), 5)
        q = [sampling.logprobs(row) for row in logits[:4]]
        stream = rule.draft_stream(sampling.position)
        tokens = [gumbel_argmax(row, seed, sampling.position + i, stream) for i, row in enumerate(q)]
        verdict = judge(rule, Candidate(DraftTree.chain(tokens, logprobs=q), logits, sampling))
        if rule.lossless:
            assert verdict.path == (0, 1, 2, 3)


def test_tokens_of_probability_zero_are_never_kept(rule: AcceptanceRule) -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0], [0.0, 0.0, 0.0]])
    q = torch.log(torch.tensor([0.2, 0.6, 0.2]))
    for seed in range(50):
        sampling = SamplingState(SamplingParams(temperature=1.0, seed=seed), 3)
        for tree in (DraftTree.chain([1], logprobs=[q]), DraftTree.chain([1])):
            verdict = judge(rule, Candidate(tree, logits, sampling))
            assert verdict.path == ()
            assert verdict.token in (0, 2)


def test_a_draft_that_q_calls_impossible_is_rejected_without_a_division_by_zero() -> None:
    q = torch.log(torch.tensor([0.5, 0.5, 0.0]))
    logits = torch.zeros(2, 3)
    for name in ("rejection", "block"):
        for seed in range(20):
            sampling = SamplingState(SamplingParams(temperature=1.0, seed=seed), 3)
            assert judge(build(name), Candidate(DraftTree.chain([2], logprobs=[q]), logits, sampling)).path == ()


def test_draft_noise_is_the_targets_own_or_another_in_every_round(rule: AcceptanceRule) -> None:
    streams = [rule.draft_stream(position) for position in range(5)]
    if rule.noise_stream is Stream.TARGET:
        assert streams == [Stream.TARGET] * 5
        assert not rule.needs_all_proposals
    else:
        assert len({*streams, *Stream}) == 5 + len(Stream)
        assert rule.needs_all_proposals


class TestTypical:
    ROWS = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]]))

    def judge(self, tree: DraftTree, logits: torch.Tensor, **settings: float) -> Verdict:
        config = SpeculativeConfig(acceptance="typical", allow_lossy=True, **settings)  # type: ignore[arg-type]
        rule = RULES.get("typical")(config)
        return judge(rule, Candidate(tree, logits, SamplingState(SamplingParams(temperature=1.0, seed=1), 4)))

    def test_keeps_what_reaches_the_threshold(self) -> None:
        # exp(-entropy) of (0.5, 0.3, 0.15, 0.05) is 0.319: the threshold is 0.09 by default, 0.064 at alpha 0.2.
        for token, kept in ((1, 1), (2, 1), (3, 0)):
            assert len(self.judge(DraftTree.chain([token]), self.ROWS[:2]).path) == kept
        assert len(self.judge(DraftTree.chain([2]), self.ROWS[:2], posterior_threshold=0.2).path) == 1
        assert (
            len(self.judge(DraftTree.chain([2]), self.ROWS[:2], posterior_threshold=1, posterior_alpha=0.5).path) == 0
        )
        assert len(self.judge(DraftTree.chain([3]), self.ROWS[:2], posterior_alpha=0.1).path) == 1

    def test_a_token_that_is_ruled_out_is_kept_at_no_threshold(self) -> None:
        rows = self.ROWS[:2].clone()
        rows[0, 3] = -math.inf
        assert self.judge(DraftTree.chain([3]), rows, posterior_threshold=0).path == ()
        assert self.judge(DraftTree.chain([2]), rows, posterior_threshold=0).path == (0,)

    def test_the_longest_path_wins_and_the_first_of_equals(self) -> None:
        rows = self.ROWS[[0, 0, 0, 1, 0]]
        tree = DraftTree([0, 1, 0, 0], [ROOT, ROOT, 1, 0], [0.5] * 4)
        assert self.judge(tree, rows).path == (1, 2)
        tree = DraftTree([0, 1, 3, 0], [ROOT, ROOT, 1, 0], [0.5] * 4)
        assert self.judge(tree, rows).path == (0, 3)

    def test_a_node_below_a_rejected_one_is_lost(self) -> None:
        assert self.judge(DraftTree.chain([3, 0]), self.ROWS[[0, 1, 1]]).path == ()

    def test_goes_on_with_the_targets_own_token(self) -> None:
        coupled = judge(
            build("coupled"),
            Candidate(DraftTree(), self.ROWS[:1], SamplingState(SamplingParams(temperature=1, seed=1), 4)),
        )
        assert self.judge(DraftTree.chain([3]), self.ROWS[:2]).token == coupled.token
