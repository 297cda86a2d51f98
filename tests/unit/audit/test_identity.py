"""The comparison of answers: what counts as a difference, what as a near-tie, and what is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from outrider import LLM, RequestOutput, SamplingParams
from outrider.audit.identity import compare
from outrider.core.noise import gumbel
from tests.support.fake_llm import fake_llm, use_fakes
from tests.support.fakes import random_logits

PROMPT = [5, 9, 11]
GAP = 3e-5


def tied(history: Sequence[int]) -> torch.Tensor:
    """Tokens 6 and 7 lead everywhere, GAP apart."""
    logits = random_logits(history)
    logits[6], logits[7] = 20.0, 20.0 - GAP
    return logits


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    use_fakes(monkeypatch, tied)
    return fake_llm("none")


def answer(llm: LLM, params: SamplingParams) -> RequestOutput:
    return llm.generate(PROMPT, params)[0]


def changed(output: RequestOutput, position: int, token: int) -> RequestOutput:
    return replace(output, token_ids=[*output.token_ids[:position], token, *output.token_ids[position + 1 :]])


def test_equal_answers_are_identical(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    report = compare(llm, [params], [answer(llm, params)], [answer(llm, params)])
    assert report.identical
    assert report.tokens == 8


def test_a_flip_within_the_bound_is_a_near_tie(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    plain = answer(llm, params)
    report = compare(llm, [params], [plain], [changed(plain, 3, 7)])
    assert not report.identical
    assert not report.differences
    (flip,) = report.near_ties
    assert (flip.position, flip.expected, flip.found) == (3, 6, 7)
    assert flip.margin == pytest.approx(GAP, rel=0.1)
    assert report.tokens == 4


def test_no_bound_no_near_tie(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    plain = answer(llm, params)
    assert len(compare(llm, [params], [plain], [changed(plain, 3, 7)], near_tie=0).differences) == 1


def test_another_token_is_a_difference(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    plain = answer(llm, params)
    (difference,) = compare(llm, [params], [plain], [changed(plain, 0, 12)]).differences
    assert difference.margin > 1


def test_with_a_temperature_the_noise_counts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=3)
    plain = answer(llm, params)
    first = plain.token_ids[0]
    other = 7 if first == 6 else 6
    found = compare(llm, [params], [plain], [changed(plain, 0, other)])
    (difference,) = (*found.differences, *found.near_ties)
    noise = gumbel(3, len(PROMPT), [first, other])
    sign = 1 if first == 6 else -1
    assert difference.margin == pytest.approx(abs(sign * GAP + noise[0] - noise[1]), rel=1e-3)


def test_an_answer_that_just_ends_is_a_difference(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    plain = answer(llm, params)
    (difference,) = compare(llm, [params], [plain], [replace(plain, token_ids=plain.token_ids[:5])]).differences
    assert (difference.position, difference.margin) == (5, math.inf)


def test_a_token_that_could_not_come_is_a_difference(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, banned_token_ids=[7])
    plain = answer(llm, params)
    (difference,) = compare(llm, [params], [plain], [changed(plain, 2, 7)]).differences
    assert difference.margin == math.inf
