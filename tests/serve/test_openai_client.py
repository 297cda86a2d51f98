"""OpenAI's own client over everything that the server has: both endpoints with every option, and the other paths."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from outrider import LLM, SamplingParams
from tests.serve.support import Running, get, post, tokenizer
from tests.serve.test_chat import MESSAGES
from tests.serve.test_completions import OPTIONS

NOT_FIELDS = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
ENDPOINTS = ["completions", "chat"]


def create(client: OpenAI, endpoint: str, **options: Any) -> Any:
    if endpoint == "chat":
        return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
    return client.completions.create(model="tiny", prompt="a b a b a b", **options)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_in_a_chat_what_it_does_in_the_engine(
    client: OpenAI, plain: LLM, name: str, stream: bool
) -> None:
    options, params = OPTIONS[name]
    right = plain.chat(MESSAGES, SamplingParams(**{"max_tokens": 40, **params}))[0]
    answer = create(client, "chat", max_tokens=40, stream=stream, **options)
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == (right.text, right.finish_reason)


def test_a_stop_string_ends_a_chat(client: OpenAI, plain: LLM) -> None:
    text = plain.chat(MESSAGES, SamplingParams(max_tokens=40))[0].text
    answer = create(client, "chat", temperature=0, max_tokens=40, stop=[text[5:9], "never there"])
    assert answer.choices[0].message.content == text[: text.index(text[5:9])]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_stream_says_the_same_of_speculation_as_a_whole_answer(client: OpenAI, endpoint: str) -> None:
    options: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 60,
        "extra_body": {
            "speculative": {"method": "ngram", "num_speculative_tokens": 5},
            "ignore_eos": True,
            "priority": 1,
        },
    }
    whole = create(client, endpoint, **options).usage
    *_, last = create(client, endpoint, stream=True, stream_options={"include_usage": True}, **options)
    # The second one may find its prompt in the cache; what was drafted and kept is the same.
    assert last.usage.completion_tokens == whole.completion_tokens == 60
    names = ("drafted", "accepted", "accepted_by_position", "rounds")
    assert {name: last.usage.speculative[name] for name in names} == {name: whole.speculative[name] for name in names}
    assert whole.speculative["drafted"] > 0 or endpoint == "chat"  # whose text repeats nothing


def test_the_paths_beside_openais(server: Running, client: OpenAI) -> None:
    beside = client.with_options(base_url=server.url)
    found = beside.post("/tokenize", body={"prompt": "The quick"}, cast_to=dict[str, Any])
    assert found["tokens"] == tokenizer().encode("The quick")
    text = beside.post("/detokenize", body={"tokens": found["tokens"]}, cast_to=dict[str, Any])
    assert text["prompt"] == "The quick"
    for path in ("/health", "/ready", "/metrics"):
        assert beside.get(path, cast_to=str), path  # anything but a 200 raises
    with pytest.raises(BadRequestError):
        beside.post("/detokenize", body={"tokens": "x"}, cast_to=dict[str, Any])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_everything_that_the_client_can_send_is_known_here(server: Running, client: OpenAI, endpoint: str) -> None:
    """Honoured or refused by name: nothing that the installed client has a parameter for is passed over in silence."""
    resource = client.chat.completions if endpoint == "chat" else client.completions
    sent = set(inspect.signature(type(resource).create).parameters) - NOT_FIELDS
    _, document = get(server, "/openapi.json")
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    known = set(document["components"]["schemas"][body["$ref"].rsplit("/", 1)[-1]]["properties"])
    assert len(sent & known) > 10
    good = (
        {"model": "tiny", "max_tokens": 1, "messages": MESSAGES}
        if endpoint == "chat"
        else {"model": "tiny", "prompt": "a"}
    )
    for name in sent - known:
        status, _, answer = post(server, path, {**good, name: "x"})
        assert (status, answer["error"]["param"]) == (400, name)
