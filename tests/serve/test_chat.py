"""/v1/chat/completions through OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from outrider import LLM, SamplingParams
from tests.serve.support import tokenizer

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


def expected(plain: LLM, messages: Any = MESSAGES, **params: Any) -> Any:
    return plain.chat(messages, SamplingParams(**{"max_tokens": 40, **params}))[0]


def ask(client: OpenAI, messages: Any = MESSAGES, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages, **{"max_tokens": 40, **options})


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_that_of_plain_decoding(client: OpenAI, plain: LLM, limit: str) -> None:
    right = expected(plain, temperature=1.0, seed=5, max_tokens=30)
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=5, **{limit: 30})  # type: ignore[arg-type]
    assert got.choices[0].message.content == right.text
    assert got.choices[0].finish_reason == right.finish_reason
    assert got.usage is not None
    assert got.usage.total_tokens == len(right.prompt_token_ids) + len(right.token_ids)


def test_a_stream_adds_up_to_the_answer(client: OpenAI, plain: LLM) -> None:
    right = expected(plain, temperature=1.0, seed=5)
    chunks = list(ask(client, seed=5, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == right.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [right.finish_reason]
    assert chunks[-1].usage.completion_tokens == len(right.token_ids)


def test_several_answers_in_one_stream(client: OpenAI, plain: LLM) -> None:
    texts = ["", "", ""]
    for chunk in ask(client, n=3, seed=9, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [expected(plain, temperature=1.0, seed=9 + i).text for i in range(3)]


def test_without_a_limit_the_context_is_the_limit(client: OpenAI, plain: LLM) -> None:
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert got.usage is not None
    assert got.usage.total_tokens == 256
    assert got.choices[0].finish_reason == "length"


def test_logprobs(client: OpenAI, plain: LLM) -> None:
    right = expected(plain, max_tokens=10, logprobs=2)
    options = {"temperature": 0, "max_tokens": 10, "logprobs": True, "top_logprobs": 2}
    content = ask(client, **options).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [entry.logprob for entry in right.logprobs]
    assert [bytes(entry.bytes) for entry in content] == [tokenizer().token_bytes(t) for t in right.token_ids]
    assert [[t.logprob for t in e.top_logprobs] for e in content] == [[v for _, v in e.top] for e in right.logprobs]
    streamed = [c.choices[0].logprobs for c in ask(client, **options, stream=True)]
    assert [entry for part in streamed if part for entry in part.content] == content
    assert ask(client, temperature=0, max_tokens=2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_parts_of_a_message_are_joined(client: OpenAI, plain: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    right = expected(plain, [{"role": "user", "content": "one\ntwo"}])
    assert ask(client, parts, temperature=0).choices[0].message.content == right.text


def test_developer_is_the_system_under_a_newer_name(client: OpenAI, plain: LLM) -> None:
    newer = [{**MESSAGES[0], "role": "developer"}, MESSAGES[1]]
    assert ask(client, newer, temperature=0).choices[0].message.content == expected(plain).text


def test_an_answer_can_be_sent_back(client: OpenAI) -> None:
    message = ask(client, temperature=0).choices[0].message
    got = ask(client, [*MESSAGES, message, {"role": "user", "content": "Go on."}], temperature=0)
    assert got.choices[0].message.role == "assistant"


def test_harmless_fields_change_nothing(client: OpenAI, plain: LLM) -> None:
    got = ask(
        client,
        temperature=0,
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
        safety_identifier="s",
        prompt_cache_key="k",
        parallel_tool_calls=True,
        modalities=["text"],
        response_format={"type": "text"},
        n=None,
        stop=None,
        top_p=None,
        tool_choice="none",
        stream=False,
    )
    assert got.choices[0].message.content == expected(plain).text


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages", "needs content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url", "unknown"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages", "messages.0.tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "differ"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": "auto"}, "function_call", "use tool_choice"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction", "not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "no such setting"),
        ({"modalities": ["text", "audio"]}, "modalities", "'text'"),
        ({"store": True}, "store", "False"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema if, and only if"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: OpenAI, options: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **options})
    assert words in raised.value.message
    assert raised.value.param == param
