"""Over HTTP as in the engine: whatever a request asks for, how it was drafted for cannot be seen in the answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from outrider.core.config import SpeculativeConfig
from tests.serve.support import Running, lively, open_llm, post, readable, serving, unlikely
from tests.serve.test_tools import SCHEMA, TOOLS, tool_model

METHODS = [
    *("ngram", "suffix", "recycle", "lookahead", "suffix+recycle", "ngram+suffix+recycle"),
    *("draft_model", "eagle", "suffix+draft_model", "recycle+eagle", "auto"),
]
TEXT = "to be or not to be, to be or"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}]}

ENDING: dict[str, Any] = {"temperature": 1, "logit_bias": unlikely(" "), "max_tokens": 64}
"""For JSON: with a target that knows nothing, the space between its parts would have no end."""
REPEATED = str(readable()[100])
"""A token that is made likely where a text would else say nothing twice, and leave n-grams nothing to find."""
PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1, "top_p": 0.8},
    "top_k": {"temperature": 1, "top_k": 4},
    "min_p": {"temperature": 1, "min_p": 0.1},
    "repetition_penalty": {"temperature": 0, "repetition_penalty": 1.3},
    "presence_penalty": {"temperature": 0.5, "presence_penalty": 1.5},
    "frequency_penalty": {"temperature": 0.5, "frequency_penalty": 0.7},
    "logit_bias": {"temperature": 0, "logit_bias": {"70": 40, "71": -100}},
    "min_tokens": {"temperature": 1, "min_tokens": 30},
    "ignore_eos": {"temperature": 1, "ignore_eos": True},
    "stop": {"temperature": 0.8, "ignore_eos": True, "stop": ["cafed", "never there"]},
    "stop_token_ids": {"temperature": 1, "ignore_eos": True, "stop_token_ids": [*range(300, 330)]},
    "n": {"temperature": 1, "n": 3},
    "regex": {"temperature": 1, "regex": "[a-z ]{3,40}"},
    "grammar": {"temperature": 1, "grammar": 'root ::= (" to be" | " or not" | ", ")+ "!"', "max_tokens": 32},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "chat": {
        **CHAT,
        "temperature": 0.8,
        "ignore_eos": True,
        "logit_bias": {REPEATED: 9},
        "logprobs": True,
        "top_logprobs": 2,
    },
    "json_object": {
        **CHAT,
        "temperature": 1,
        "logit_bias": {**unlikely(" {}"), REPEATED: 9},
        "response_format": {"type": "json_object"},
    },
    "json_schema": {
        **CHAT,
        **ENDING,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
}
TOOL_CALLS: dict[str, dict[str, Any]] = {
    "tools": {**CHAT, "temperature": 0.5, "tools": TOOLS},
    "tool_choice required": {**CHAT, **ENDING, "tools": TOOLS, "tool_choice": "required"},
    "tool_choice named": {
        **CHAT,
        **ENDING,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "time"}},
    },
}
EVERYTHING = PARAMETERS | TOOL_CALLS
SIZES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"kv_tokens": 768},
    "uncached": {"enable_prefix_caching": False},
    "tight and uncached": {"kv_tokens": 768, "enable_prefix_caching": False},
}


def start(**sizes: Any) -> Any:
    """A server whose requests may choose any of the methods, of a model that knows tools."""
    config = SpeculativeConfig(
        method="suffix+recycle+draft_model+eagle", model="tiny", num_speculative_tokens=8, adaptive=False
    )
    drafters = {"eagle": "tests.serve.support:Eagle"}
    return serving(open_llm(lively, config, drafters=drafters, of=tool_model(), **{"max_context": 768, **sizes}))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with start() as running:
        yield running
        assert running.settled()


def ask(
    running: Running, own: dict[str, Any], speculative: dict[str, Any], *, model: str = "tiny", seed: int = 7
) -> tuple[Any, dict[str, Any]]:
    """The answers, without the names of calls, which are drawn; and what speculation did for them."""
    body = {"model": model, "max_tokens": 48, "seed": seed, "speculative": speculative, **own}
    chat = "messages" in own
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, _, answer = post(running, path, body if chat else {"prompt": TEXT, **body})
    assert status == 200, answer
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    return answer["choices"], answer["usage"]["speculative"]


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_parameter_lets_the_method_be_seen(server: Running, name: str) -> None:
    own = EVERYTHING[name]
    plain, statistics = ask(server, own, {"method": "none"})
    assert statistics["drafted"] == 0
    for number, method in enumerate(METHODS):
        found, statistics = ask(server, own, {"method": method, "num_speculative_tokens": 3 + number})
        assert found == plain, method
        assert statistics["drafted"] > 0, f"{method} drafted nothing: the test says nothing"
        assert statistics["failures"] == 0


@cache
def mixed() -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    """64 requests of every kind: parameters, method, seed."""
    choose = random.Random(5)
    every = [own for own in EVERYTHING.values() for _ in range(3)]
    return [(own, {"method": choose.choice(["none", *METHODS])}, choose.randrange(1000)) for own in every[:64]]


@pytest.fixture(scope="module")
def alone(server: Running) -> list[Any]:
    """Their answers, one by one and without speculation."""
    return [ask(server, own, {"method": "none"}, seed=seed)[0] for own, _, seed in mixed()]


@pytest.mark.parametrize("sizes", SIZES)
def test_all_at_once_is_one_by_one(alone: list[Any], sizes: str) -> None:
    with start(**SIZES[sizes]) as running:
        running.target.pause = 0.002  # on a busy machine, answers would else end before others begin
        with ThreadPoolExecutor(64) as pool:
            together = list(pool.map(lambda each: ask(running, *each[:2], seed=each[2]), mixed()))
        assert [answer for answer, _ in together] == alone
        assert not any(statistics["failures"] for _, statistics in together)
        assert running.settled()
        found = running.metrics()
        assert (found["outrider:num_preemptions_total"] > 0) == ("tight" in sizes)
        assert (found["outrider:prefix_cache_hits_total"] > 0) == ("uncached" not in sizes)
        assert found["outrider:spec_decode_num_accepted_tokens_total"] > 0
