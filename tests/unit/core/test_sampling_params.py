"""Sampling parameters: what is refused, and how it is said."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.core.errors import SamplingParamsError, UnknownNameError
from outrider.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1.5: 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1": 1, "01": 2}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", [1]),
        ("banned_token_ids", [-1]),
        ("banned_token_ids", ["1"]),
        ("banned_token_ids", 5),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", "12"),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 101),
        ("ignore_eos", "yes"),
        ("skip_special_tokens", 1),
        ("stop", [""]),
        ("stop", ["a", 1]),
        ("stop", 5),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=name):
        SamplingParams(**{name: value})


def test_contradictions_are_refused() -> None:
    with pytest.raises(SamplingParamsError, match="min_tokens=10 is more than max_tokens=5"):
        SamplingParams(min_tokens=10, max_tokens=5)
    assert SamplingParams(min_tokens=10, max_tokens=None).min_tokens == 10


def test_the_edges_are_allowed() -> None:
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2, seed=2**64 - 1)
    SamplingParams(min_tokens=5, max_tokens=5, logprobs=0, logit_bias={0: -100})


def test_forms_that_json_and_users_write() -> None:
    params = SamplingParams(stop="end", logit_bias={"12": 1}, banned_token_ids=[1, 2])
    assert params.stop_strings == ("end",)
    assert params.logit_bias == {12: 1}
    assert params.banned_token_ids == (1, 2)
    assert SamplingParams(stop=None).stop_strings == ()  # type: ignore[arg-type]


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})
    assert SamplingParams.from_dict({"top_k": 3}).top_k == 3
