"""Bodies that nobody should send: each gets a 4xx in OpenAI's form, and the next good request is right."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from tests.serve.support import Running, lively, open_llm, post, serving
from tests.serve.test_tools import SCHEMA, TOOLS, tool_model

CHAT = "/v1/chat/completions"
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "The quick", "max_tokens": 4, "temperature": 0}),
    (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ("/tokenize", {"prompt": "The quick"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    (
        "/v1/completions",
        {
            "model": "tiny",
            "prompt": ["The quick", "x"],
            "max_tokens": 4,
            "seed": 7,
            "stop": ["a", "b"],
            "logit_bias": {"7": 1.5, "8": -2},
            "logprobs": 1,
            "speculative": {"method": "suffix+recycle", "num_speculative_tokens": 4},
            "stop_token_ids": [9, 10],
            "stream": False,
        },
    ),
    (
        CHAT,
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"city": "Rome"}'}}
                    ],
                },
                {"role": "tool", "content": "noon", "tool_call_id": "1"},
            ],
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "time"}},
            "max_tokens": 4,
            "speculative": {"num_speculative_tokens": 4},
        },
    ),
    (
        CHAT,
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "stop": "z",
            "max_tokens": 4,
            "seed": 1,
        },
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}),
]
FIRST = dict(reversed(GOOD))
"""The plainest body of each path."""
WRONG_VALUES: list[Any] = [
    *(True, {}, [], [[]], [None], {"a": 1}, [{"a": []}], -1, -(10**30), 10**30, 1.5, "", "\x00", "1", [1, "a"]),
    *([[1], ["a"]], {"type": "x"}, [{"role": "user", "content": None}], [{"role": "user", "content": []}]),
]
RAW = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"\xff\xfe{}",
    b'{"model": "tiny", "prompt": "\xc3\x28"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\\udc00 x"}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d"}]}',
    b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 4000 + b"}",
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model": "tiny", "messages": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b'{"model": "tiny", "messages": []}',
    b'{"model": "tiny", "messages": [{}]}',
    b'{"model": "tiny", "prompt": "' + b"a" * 1_000_000 + b'"}',
    b'{"model": "' + b"a" * 1_000_000 + b'", "prompt": "x"}',
    b'{"' + b"a" * 1_000_000 + b'": 1}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"a " * 500_000 + b'"}]}',
    b'{"model": "tiny", "prompt": "x", "stop": "' + b"a" * 1_000_000 + b'", "max_tokens": 0}',
    b'{"model": "tiny", "prompt": [' + b"1," * 400_000 + b"1]}",
    b'{"tokens": [' + b"99999999999," * 100 + b"1]}",
    b'{"prompt": 1}',
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a body, at whatever depth."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def broken(rng: random.Random, good: dict[str, Any]) -> bytes:
    """A good body with one thing about it wrong, at any depth."""
    body = json.loads(json.dumps(good))
    kind = rng.choice(["truncated", "flipped", "value", "field", "missing"])
    every = list(places(body))
    if kind == "missing":
        needed = [(at, key) for at, key in every if key not in ("max_tokens", "temperature")]
        at, key = rng.choice(needed)
        del at[key]
    elif kind == "field":
        at = rng.choice([body, *(at[key] for at, key in every if isinstance(at[key], dict))])
        at["".join(rng.choices("abcdefgh_\u00e9\u4e2d", k=rng.randint(1, 12)))] = rng.choice(WRONG_VALUES)
    elif kind == "value":
        at, key = rng.choice(every)
        at[key] = rng.choice([v for v in WRONG_VALUES if v not in ("1", "", "\x00", [])])
    text = json.dumps(body).encode()
    if kind == "truncated":
        return text[: rng.randrange(len(text))]
    if kind == "flipped":
        at = rng.randrange(len(text))
        return text[:at] + bytes([rng.choice([0, 0x80, 0xFF, 0x0A])]) + text[at + 1 :]
    return text


def check_good(server: Running, plain: LLM) -> None:
    status, _, answer = post(server, "/v1/completions", FIRST["/v1/completions"])
    assert status == 200
    assert answer["choices"][0]["text"] == plain.generate("The quick", SamplingParams(max_tokens=4))[0].text


def check_refused(server: Running, path: str, body: bytes) -> None:
    status, _, answer = post(server, path, body)
    assert 400 <= status < 500, (path, body[:200], status)
    assert set(answer) == {"error"}, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 2000
    assert "Traceback" not in error["message"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Of a model that knows tools, or bodies with tools would all be refused for that."""
    with serving(open_llm(lively, "suffix+recycle", of=tool_model(), max_context=1024)) as running:
        yield running
        assert running.settled()


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_the_good_ones_are_good(server: Running, path: str, body: dict[str, Any]) -> None:
    assert post(server, path, body)[0] == 200


@pytest.mark.parametrize("raw", range(len(RAW)))
def test_a_body_that_nobody_should_send(server: Running, plain: LLM, raw: int) -> None:
    for path in FIRST:
        if path == "/tokenize" and post(server, path, RAW[raw])[0] == 200:
            assert len(RAW[raw]) > 400_000, "nothing is wrong about a long text there"
        else:
            check_refused(server, path, RAW[raw])
    check_good(server, plain)


@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_bodies_with_one_thing_wrong(server: Running, plain: LLM, seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    while refused < 100:
        path, good = rng.choice(GOOD)
        body = broken(rng, good)
        status, _, answer = post(server, path, body)
        assert status < 500, (path, body, answer)
        # A flipped byte inside a text, say, makes another good body.
        if status != 200:
            check_refused(server, path, body)
            refused += 1
    check_good(server, plain)
    assert server.settled()


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"1": 1, "01": 2}},
        {"grammar": "root ::= root"},
        {"regex": "(yes|no)", "min_tokens": 9, "max_tokens": 20},
    ],
    ids=["a key beyond int()", "a key twice", "an empty language", "a text too short"],
)
def test_what_leaves_nothing_to_answer_with_is_the_clients_fault(
    server: Running, plain: LLM, more: dict[str, object]
) -> None:
    """Of the wrong status, clients would send it again and again."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        check_refused(server, path, json.dumps({**FIRST[path], "temperature": 1, "seed": 1, **more}).encode())
    check_good(server, plain)
