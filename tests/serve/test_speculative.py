"""The ``speculative`` and ``priority`` fields, for builds whose engine takes them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from outrider.engine.engine import Engine
from tests.serve.support import Running, post

TAKEN = set(inspect.signature(Engine.new_request).parameters)
BODY: dict[str, Any] = {"model": "tiny", "prompt": "a b a b a b", "max_tokens": 60, "temperature": 0}

needs_methods = pytest.mark.skipif("speculation" not in TAKEN, reason="this build has one way to speculate")


@pytest.mark.skipif("speculation" in TAKEN, reason="this build has it")
@pytest.mark.parametrize(("field", "value"), [("speculative", {"method": "none"}), ("priority", 1)])
def test_a_build_without_it_says_so(server: Running, field: str, value: Any) -> None:
    status, _, answer = post(server, "/v1/completions", {**BODY, field: value})
    assert (status, answer["error"]["param"]) == (400, field)
    assert "not available in this build" in answer["error"]["message"]


@needs_methods
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


@needs_methods
def test_a_request_chooses_how_much(server: Running) -> None:
    one = post(server, "/v1/completions", {**BODY, "speculative": {"num_speculative_tokens": 1}})[2]
    stats = one["usage"]["speculative"]
    assert 0 < stats["drafted"] <= stats["rounds"]


@needs_methods
@pytest.mark.parametrize("method", ["nothing", "draft_model", "none+ngram", "sufix"])
def test_a_method_that_cannot_be_had(client: OpenAI, method: str) -> None:
    with pytest.raises(BadRequestError):
        client.completions.create(**BODY, extra_body={"speculative": {"method": method}})


@pytest.mark.skipif("priority" not in TAKEN, reason="this build has no priorities")
def test_a_priority_is_taken(server: Running) -> None:
    assert post(server, "/v1/completions", {**BODY, "priority": -5})[0] == 200
