"""Every exact rule, on a hundred thousand sequences of models whose every probability is known.

The law of the first token and of the first three, over two rounds and more, against the target's: chi-square, false
alarm below 10^-7 for all of them together with other seeds (see `markov.RARE`). `test_distribution_twins` shows that
wrong rules fail.
"""

from __future__ import annotations

import pytest
import torch

from outrider.acceptance import VerifyResult, rejection_sample
from tests.lossless.markov import (
    DRAWS,
    METHODS,
    RARE,
    Draft,
    Method,
    Scenario,
    by_coupling,
    draft,
    fresh_noise,
    method,
    p_values,
    scenario,
    scenarios,
    simulate,
)

Tensor = torch.Tensor


WIDE = "rejection, wide tree"
CASES = [
    pytest.param(case, rule, id=f"{case.name}: {rule.name}")
    for case in scenarios()
    for rule in METHODS
    if rule.name != WIDE or case.name in ("generic", "tokens of probability zero")
]


@pytest.mark.parametrize(("case", "rule"), CASES)
def test_speculation_has_the_law_of_the_target(case: Scenario, rule: Method) -> None:
    found = p_values(simulate(case, rule), case.law())
    assert all(p > RARE for p in found.values()), found


def first_round(case: Scenario, rule: Method) -> VerifyResult:
    generator = torch.Generator().manual_seed(9)
    noise = fresh_noise((20_000, rule.depth + 1, case.vocab), generator)
    drafted = draft(case, torch.zeros(20_000, 2, dtype=torch.long), rule.width, rule.depth, noise)
    return rule.judge(drafted, noise, generator)


def test_the_scenarios_are_what_they_are_called() -> None:
    rule = method("rejection, chain")
    accepted = {case.name: first_round(case, rule).accepted for case in scenarios()}
    assert bool((accepted["all accepted"] == 3).all())
    assert (accepted["rejected at the first position"] == 0).float().mean() > 0.6
    middle = accepted["rejected in the middle"]
    assert bool((middle >= 1).all())
    assert (middle == 1).float().mean() > 0.6
    eos = simulate(scenario("EOS inside"), rule)
    assert 0.05 < ((eos[:, 0] != 2) & (eos[:, 1] == 2)).float().mean() < 0.5
    for name in ("tokens of probability zero", "tokens of probability zero, EOS inside"):
        case = scenario(name)
        assert bool(((case.p == 0) & (case.q > 0)).any())
        assert bool(((case.q == 0) & (case.p > 0)).any())


def test_a_draft_whose_q_is_not_told_is_judged_exactly_as_well() -> None:
    def judge(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
        return rejection_sample(draft.ids, None, draft.target, parents=draft.parents, generator=generator)

    case = scenario("generic")
    found = p_values(simulate(case, Method("", judge, width=2, depth=2)), case.law())
    assert all(p > RARE for p in found.values()), found


def test_coupled_text_does_not_depend_on_the_draft() -> None:
    for case in scenarios():
        texts = [simulate(case, rule, draws=DRAWS // 10) for rule in METHODS if rule.judge is by_coupling]
        assert len(texts) == 3
        assert all(torch.equal(text, texts[0]) for text in texts)


def test_block_verification_keeps_more_than_rejection_never_less() -> None:
    """Means of 20,000 rounds; block's advantage is a theorem, and here it is many standard errors."""
    for case in scenarios():
        block, chain = (
            first_round(case, method(f"{name}, chain")).accepted.double() for name in ("block", "rejection")
        )
        assert block.mean() > chain.mean() - 6 * (2 / 20_000) ** 0.5
    gain = first_round(scenario("memory"), method("block, chain")).accepted.double().mean()
    assert gain > first_round(scenario("memory"), method("rejection, chain")).accepted.double().mean() + 0.02


def test_two_tokens_as_on_paper() -> None:
    """q = (0.2, 0.8), p = (0.6, 0.4): (0.6, 0.4) comes out."""
    p = torch.tensor([0.6, 0.4], dtype=torch.float64).expand(2, 2, 2).clone()
    q = torch.tensor([0.2, 0.8], dtype=torch.float64).expand(2, 2, 2).clone()
    case = Scenario("paper", p, q)
    for name in ("rejection, chain", "rejection, tree", "block, chain", "coupled, chain"):
        tokens = simulate(case, method(name))
        assert min(p_values(tokens, case.law()).values()) > RARE
        assert abs((tokens[:, 0] == 0).double().mean() - 0.6) < 0.012


def test_three_tokens_as_on_paper() -> None:
    """q = (0.5, 0.3, 0.2), p = (0.2, 0.5, 0.3), draft A: kept with 0.4, else B or C with 2/3 and 1/3."""
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    grid = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    count = len(grid)

    def judge(u: Tensor, last: Tensor) -> VerifyResult:
        ids = torch.zeros(count, 1, dtype=torch.long)
        target = torch.stack([p, p]).expand(count, 2, 3)
        return rejection_sample(ids, q.expand(count, 1, 3), target, uniforms=u.unsqueeze(1), resample_uniforms=last)

    kept = judge(grid, grid.flip(0))
    assert int(kept.accepted.sum()) == 1200
    rejected = judge(torch.full_like(grid, 0.9), grid)
    assert torch.bincount(rejected.next_token, minlength=3).tolist() == [0, 2000, 1000]


def test_the_simulation_drafts_without_replacement() -> None:
    case = scenario("generic")
    noise = fresh_noise((DRAWS, 1, 4), torch.Generator().manual_seed(2))
    drafted = draft(case, torch.zeros(DRAWS, 2, dtype=torch.long), 2, 1, noise)
    q = case.q[0, 0]
    law = q.unsqueeze(1) * (q / (1 - q.unsqueeze(1)))
    law.fill_diagonal_(0)
    seen = torch.bincount(drafted.ids[:, 0] * 4 + drafted.ids[:, 1], minlength=16).double()
    assert bool((seen.view(4, 4).diagonal() == 0).all())
    assert bool(((seen / DRAWS - law.ravel()).abs() < 7 * (law.ravel() / DRAWS).sqrt() + 1e-9).all())
