"""The ``speculative`` and ``priority`` fields."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.serve.support import Running, post

BODY: dict[str, Any] = {"model": "tiny", "prompt": "a b a b a b", "max_tokens": 60, "temperature": 0}


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "recycle", "suffix+recycle", "ngram+recycle"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_request_chooses_its_method_and_keeps_its_text(server: Running, method: str, seed: int | None) -> None:
    own = BODY if seed is None else {**BODY, "temperature": 1.0, "seed": seed}
    plain = post(server, "/v1/completions", {**own, "speculative": {"method": "none"}})[2]
    status, _, answer = post(server, "/v1/completions", {**own, "speculative": {"method": method}})
    assert status == 200
    assert answer["choices"] == plain["choices"] or seed is None
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
    assert plain["usage"]["speculative"]["drafted"] == 0
    assert set(answer["usage"]["speculative"]["drafted_by_source"]) <= set(method.split("+"))


def test_a_request_chooses_how_much(server: Running) -> None:
    one = post(server, "/v1/completions", {**BODY, "speculative": {"num_speculative_tokens": 1}})[2]
    stats = one["usage"]["speculative"]
    assert 0 < stats["drafted"] <= stats["rounds"]


@pytest.mark.parametrize("method", ["nothing", "draft_model", "none+ngram", "sufix"])
def test_a_method_that_cannot_be_had(client: OpenAI, method: str) -> None:
    with pytest.raises(BadRequestError):
        client.completions.create(**BODY, extra_body={"speculative": {"method": method}})


def test_a_priority_is_taken(server: Running) -> None:
    assert post(server, "/v1/completions", {**BODY, "priority": -5})[0] == 200
