"""Structured output and tool calls over the API."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI

from outrider.models.chat import ChatTemplate
from outrider.models.loader import Model
from outrider.models.tokenizer import Tokenizer
from tests.serve import support
from tests.serve.support import Running, endless, open_llm, serving, unlikely
from tests.serve.support import model as plain_model
from tests.support.tokenizers import trained

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n"
    'Call with <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2, 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@functools.cache
def tool_model() -> Model:
    end = trained("qwen2").token_to_id("<|im_end|>")
    own = Tokenizer(trained("qwen2"), end_ids=(end,), chat_template=ChatTemplate(TEMPLATE, {}), where="tests")
    plain = plain_model()
    return replace(plain, tokenizer=own, config=replace(plain.config, max_position=1024))


def scripted(text: str) -> support.Logits:
    """A target that answers a conversation with ``text`` and nothing else."""
    tokenizer = tool_model().tokenizer
    assert tokenizer is not None
    script = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.end_ids]
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def logits(history: Sequence[int]) -> torch.Tensor:
        ends = [at + len(header) for at in range(len(history)) if list(history[at : at + len(header)]) == header]
        at = len(history) - ends[-1] if ends else 0
        row = torch.full((tokenizer.vocab_size,), -10.0)
        row[script[min(at, len(script) - 1)]] = 10.0
        return row

    return logits


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(support, "model", tool_model)
    running: list[Any] = []

    def start(logits: support.Logits) -> Running:
        running.append(serving(open_llm(logits, "suffix+recycle", max_context=1024), max_choices=4))
        return running[-1].__enter__()  # type: ignore[no-any-return]

    yield start
    for context in running:
        context.__exit__(None, None, None)


def ask(client: OpenAI, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 240, **options}
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, [("weather", {"city": "Oslo"})]),
        (f"Let me see.\n{CALL}", "Let me see.", [("weather", {"city": "Oslo"})]),
        (
            f"{CALL}\n{CALL.replace('weather', 'time')}",
            None,
            [("weather", {"city": "Oslo"}), ("time", {"city": "Oslo"})],
        ),
        ("It is cold <tool> there.", "It is cold <tool> there.", []),
        ('<tool_call>\n{"name": "nothing", "arguments": {}}', '<tool_call>\n{"name": "nothing", "arguments": {}}', []),
    ],
)
def test_calls_are_read_from_the_answer(
    answering: Any, text: str, content: str | None, calls: list[tuple[str, Any]], stream: bool
) -> None:
    client = answering(scripted(text)).client()
    answer = ask(client, tools=TOOLS, stream=stream)
    if not stream:
        choice = answer.choices[0]
        found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        text_found, reason = choice.message.content, choice.finish_reason
    else:
        parts: dict[int, list[str]] = {}
        text_found, reason = "", None
        for chunk in answer:
            choice = chunk.choices[0]
            text_found += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or []:
                own = parts.setdefault(piece.index, ["", ""])
                if piece.id is not None:
                    assert own == ["", ""]
                    own[0] = piece.function.name
                own[1] += piece.function.arguments or ""
        found = [(name, arguments) for name, arguments in parts.values()]
        text_found = text_found or None
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert text_found == content
    assert reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("tools", [TOOLS, [{"type": "function", "function": {"name": "f"}}]])
def test_a_model_that_knows_no_tools_says_so(client: OpenAI, tools: Any) -> None:
    with pytest.raises(BadRequestError, match="no place for tools"):
        ask(client, tools=tools)


def test_without_a_choice_of_tools_calls_are_text(answering: Any) -> None:
    client = answering(scripted(CALL)).client()
    message = ask(client, tools=TOOLS, tool_choice="none").choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_a_call_can_be_forced(answering: Any, choice: Any, stream: bool) -> None:
    client = answering(scripted("No, I will not.")).client()
    answer = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream)
    if stream:
        deltas = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or []]
        names = [delta.function.name for delta in deltas if delta.id]
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
    else:
        calls = answer.choices[0].message.tool_calls
        names, arguments = [call.function.name for call in calls], calls[0].function.arguments
    assert names == ["time"] or choice == "required"
    assert len(names) == 1
    assert json.loads(arguments)["city"] in ("Oslo", "Rome")


def test_results_of_tools_can_be_sent_back(answering: Any) -> None:
    running = answering(scripted(CALL))
    client = running.client()
    message = ask(client, tools=TOOLS).choices[0].message
    history = [
        {"role": "user", "content": "Weather?"},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "cold"},
    ]
    assert ask(client, messages=history, tools=TOOLS).usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            lambda text: (
                (v := json.loads(text)).keys() == {"a", "b"} and v["a"] in (True, False) and v["b"] in (1, 2, 3)
            ),
        ),
        ({"extra_body": {"regex": "[a-f]{3}-[0-9]{2}"}}, lambda text: re.fullmatch("[a-f]{3}-[0-9]{2}", text)),
        ({"extra_body": {"grammar": 'root ::= ("ab" | "cd")+ "!"'}}, lambda text: re.fullmatch("(ab|cd)+!", text)),
    ],
)
def test_structured_answers_are_valid_or_cut_by_the_limit(client: OpenAI, options: dict[str, Any], check: Any) -> None:
    """And the same without speculation, whole and as a stream."""
    own = options.get("extra_body", {})
    ended = drafted = 0
    for seed in range(4):
        asked = {**options, "extra_body": own, "seed": seed, "temperature": 1.0, "logit_bias": unlikely(" ")}
        answer = ask(client, **asked, n=2, max_tokens=120)
        plain = ask(client, **{**asked, "extra_body": {**own, "speculative": {"method": "none"}}}, n=2, max_tokens=120)
        assert answer.choices == plain.choices
        drafted += answer.usage.speculative["drafted"]
        for choice in answer.choices:
            ended += choice.finish_reason == "stop"
            assert choice.finish_reason == "length" or check(choice.message.content), choice.message.content
        streamed = ask(client, **asked, stream=True, max_tokens=120)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert text == answer.choices[0].message.content
    assert ended, "one that is never whole is never checked"
    assert drafted, "nothing was drafted: the comparison says nothing"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"extra_body": {"regex": "("}}, "regex"),
        ({"extra_body": {"grammar": "root ::="}}, "grammar"),
        ({"extra_body": {"regex": "a", "grammar": 'root ::= "a"'}}, "regex"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"regex": "a"}}, "regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
            "response_format",
        ),
    ],
)
def test_structures_that_cannot_be(client: OpenAI, options: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequestError) as raised:
        ask(client, **options)
    assert raised.value.param == param


def test_the_fake_target_would_run_on() -> None:
    """The structure ends the answers above, not the target."""
    with serving(open_llm(endless)) as running:
        assert ask(running.client(), max_tokens=30).choices[0].finish_reason == "length"
