"""Rules that are wrong in one place: the test that passes the right ones must fail each of them.

Every twin runs through the very simulation and comparison of `test_distribution`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider.acceptance import VerifyResult, coupled_verify, formulas, rejection_sample
from tests.lossless.markov import (
    RARE,
    Draft,
    Method,
    by_block,
    by_coupling,
    by_rejection,
    method,
    p_values,
    scenario,
    simulate,
)

Tensor = torch.Tensor


def smallest_p_value(method: Method, name: str = "generic") -> float:
    case = scenario(name)
    return min(p_values(simulate(case, method), case.law()).values())


def resample_from_p(p: Tensor, q: Tensor) -> Tensor:
    return p


def resample_from_absolute_difference(p: Tensor, q: Tensor) -> Tensor:
    difference = (p - q).abs()
    return difference / difference.sum(-1, keepdim=True).clamp(min=1e-30)


def put_back(q: Tensor, token: Tensor) -> Tensor:
    return q


def inverted(p_x: Tensor, q_x: Tensor) -> Tensor:
    return (q_x / p_x).clamp(max=1)


@pytest.mark.parametrize(
    ("name", "twin", "victim"),
    [
        ("residual", resample_from_p, "rejection, chain"),
        ("residual", resample_from_p, "rejection, tree"),
        ("residual", resample_from_p, "rejection, chosen chain"),
        ("residual", resample_from_p, "block, chain"),
        ("residual", resample_from_absolute_difference, "rejection, chain"),
        ("acceptance_probability", inverted, "rejection, chain"),
        ("without", put_back, "rejection, tree"),
    ],
)
def test_a_wrong_formula(monkeypatch: pytest.MonkeyPatch, name: str, twin: Callable, victim: str) -> None:
    assert smallest_p_value(method(victim)) > RARE
    monkeypatch.setattr(formulas, name, twin)
    assert smallest_p_value(method(victim)) < RARE


def unclamped(previous: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    return previous * formulas.ratio(p_x, q_x)


def clamped_too_early(previous: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    return previous * formulas.ratio(p_x, q_x).clamp(max=1)


def forgetful(previous: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    return formulas.ratio(p_x, q_x).clamp(max=1)


def weight_itself(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return weight


def without_the_lost_mass(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    excess = (weight.unsqueeze(-1) * p - q).clamp(min=0).sum(-1)
    return excess / (excess + 1)


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("block_weight", unclamped),
        ("block_weight", clamped_too_early),
        ("block_weight", forgetful),
        ("block_acceptance", weight_itself),
        ("block_acceptance", without_the_lost_mass),
    ],
)
def test_a_wrong_recursion(monkeypatch: pytest.MonkeyPatch, name: str, twin: Callable) -> None:
    monkeypatch.setattr(formulas, name, twin)
    assert smallest_p_value(method("block, chain")) < RARE


def test_draft_noise_that_also_judges() -> None:
    """The noise that a token was drawn with decides whether it is kept: `coupled` drafts under `rejection`."""

    def judge(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
        drawn_with = noise[:, : draft.ids.shape[1]].gather(2, draft.ids.unsqueeze(2)).squeeze(2)
        u = torch.exp(-torch.exp(-drawn_with)).clamp(max=1 - 1e-12)
        return rejection_sample(draft.ids, draft.probs, draft.target, uniforms=u, generator=generator)

    assert smallest_p_value(replace(method("rejection, chain"), judge=judge)) < RARE


def test_block_verification_that_meets_a_rejected_positions_noise_again() -> None:
    """Why `draft_stream` is another one in every round: with noise keyed by position alone, `block` is biased.

    Rejection sampling looks at no noise beyond the first rejection, and stays exact.
    """
    assert smallest_p_value(Method("", by_block, shared=True), "memory") < RARE
    assert smallest_p_value(Method("", by_rejection, shared=True), "memory") > RARE
    assert smallest_p_value(Method("", by_block), "memory") > RARE


def test_chains_cut_where_the_drawn_token_is_unlikely() -> None:
    """Why `needs_all_proposals`: to leave out nodes for what they are biases a rule that compares p with q."""

    def judge(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
        unlikely = formulas.of(draft.probs, draft.ids) < 0.3
        cut = torch.where(unlikely.any(1), unlikely.int().argmax(1), draft.ids.shape[1])
        return rejection_sample(draft.ids, draft.probs, draft.target, lengths=cut, generator=generator)

    assert smallest_p_value(replace(method("rejection, chain"), judge=judge)) < RARE

    def coupled(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
        unlikely = formulas.of(draft.probs, draft.ids) < 0.3
        cut = torch.where(unlikely.any(1), unlikely.int().argmax(1), draft.ids.shape[1])
        return coupled_verify(draft.ids, draft.target.log(), gumbel=noise, lengths=cut)

    assert smallest_p_value(replace(method("coupled, chain"), judge=coupled)) > RARE


SIBLINGS = Method("", by_rejection, width=2, depth=1)


def test_siblings_cut_where_they_are_unlikely() -> None:
    def judge(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
        kept = torch.where(draft.probs[:, 0].gather(1, draft.ids[:, 1:]).squeeze(1) < 0.3, 1, 2)
        return rejection_sample(
            draft.ids, draft.probs, draft.target, parents=draft.parents, lengths=kept, generator=generator
        )

    assert smallest_p_value(SIBLINGS) > RARE
    assert smallest_p_value(replace(SIBLINGS, judge=judge)) < RARE


def test_siblings_tried_in_another_order_than_drawn() -> None:
    def judge(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
        ids, order = draft.ids.sort(1)
        rows = torch.cat([torch.zeros_like(order[:, :1]), order + 1], 1)
        target = draft.target.gather(1, rows.unsqueeze(2).expand_as(draft.target))
        return rejection_sample(ids, draft.probs, target, parents=draft.parents, generator=generator)

    assert smallest_p_value(replace(SIBLINGS, judge=judge)) < RARE


def test_noise_that_two_positions_share() -> None:
    def judge(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
        return by_coupling(draft, noise[:, :1].expand_as(noise), generator)

    assert smallest_p_value(replace(method("coupled, chain"), judge=judge)) < RARE
