"""Over HTTP as in the engine: whatever a request asks for, how it was drafted for cannot be seen in the answer."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.support import Running, post

METHODS = ["ngram", "suffix", "recycle", "lookahead", "suffix+recycle", "ngram+suffix+recycle"]
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
    "stop": {"temperature": 0, "stop": ["e", "ab"]},
    "n": {"temperature": 1, "n": 3},
    "regex": {"temperature": 1, "regex": "[a-z ]{3,40}"},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
}


def body(own: dict[str, Any], speculative: dict[str, Any], seed: int = 7) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": "to be or not to be, to be or",
        "max_tokens": 48,
        "seed": seed,
        "speculative": speculative,
        **own,
    }


def choices(running: Running, own: dict[str, Any], speculative: dict[str, Any], seed: int = 7) -> tuple[Any, int]:
    """The answers, and how many draft tokens were verified for them."""
    status, _, answer = post(running, "/v1/completions", body(own, speculative, seed))
    assert status == 200, answer
    return answer["choices"], answer["usage"]["speculative"]["drafted"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_no_parameter_lets_the_method_be_seen(server: Running, name: str) -> None:
    own = PARAMETERS[name]
    plain, drafted = choices(server, own, {"method": "none"})
    assert drafted == 0
    total = 0
    for number, method in enumerate(METHODS):
        found, drafted = choices(server, own, {"method": method, "num_speculative_tokens": 3 + 4 * number})
        assert found == plain, method
        total += drafted
    assert total > 0, "nothing was drafted: the test says nothing"


def test_all_at_once_is_one_by_one(server: Running) -> None:
    choose = random.Random(5)
    asked = [
        (
            choose.choice(list(PARAMETERS.values())),
            {"method": choose.choice(["none", *METHODS])},
            choose.randrange(1000),
        )
        for _ in range(64)
    ]
    alone = [choices(server, own, {"method": "none"}, seed)[0] for own, _, seed in asked]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda each: choices(server, *each)[0], asked))
    assert together == alone
