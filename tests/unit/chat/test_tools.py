"""Tools in prompts, and the constraints that tool choices become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.chat.formats import format_of
from outrider.chat.tools import ToolCallParser, constraint, parse_tools
from outrider.core.errors import SamplingParamsError, UnsupportedModelError, UsageError
from outrider.grammar import source
from outrider.models.chat import ChatTemplate
from tests.unit.chat import templates
from tests.unit.chat.templates import with_template

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "$defs": {"city": {"type": "string", "maxLength": 20}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "now"}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    ],
}
TALK = [{"role": "user", "content": "Hi"}, CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "warm"}]


def matches(spec: Any, text: str) -> bool:
    """Whether the whole text fits the constraint, byte by byte."""
    import xgrammar

    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b""], stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(source.grammar_of(spec))
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.is_completed()


HERMES_WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA_NOW = '{"name": "now", "parameters": {}}'


def test_required_is_one_call_or_more() -> None:
    spec = constraint(with_template(templates.HERMES), TOOLS, "required")
    assert matches(spec, HERMES_WEATHER)
    assert matches(spec, f"{HERMES_NOW}\n{HERMES_WEATHER}")
    for text in ("", "Sure.", HERMES_NOW + HERMES_NOW, HERMES_NOW + "!", HERMES_WEATHER.replace("Paris", "P" * 21)):
        assert not matches(spec, text), text
    single = constraint(with_template(templates.HERMES), TOOLS, "required", parallel=False)
    assert matches(single, HERMES_NOW)
    assert not matches(single, f"{HERMES_NOW}\n{HERMES_WEATHER}")


def test_a_named_function_is_one_call_of_it() -> None:
    spec = constraint(with_template(templates.HERMES), TOOLS, NAMED)
    assert matches(spec, HERMES_NOW)
    assert not matches(spec, HERMES_WEATHER)
    assert not matches(spec, f"{HERMES_NOW}\n{HERMES_NOW}")


def test_llama_calls_once() -> None:
    spec = constraint(with_template(templates.LLAMA), TOOLS, "required")
    assert matches(spec, LLAMA_NOW)
    assert not matches(spec, f"{LLAMA_NOW}\n{LLAMA_NOW}")
    assert not matches(spec, HERMES_NOW)


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_free_choices_constrain_nothing(choice: str) -> None:
    assert constraint(with_template(templates.HERMES), TOOLS, choice) is None


@pytest.mark.parametrize(
    "choice", ["any", None, 3, {}, {"type": "function"}, {"type": "x", "function": {"name": "now"}}]
)
def test_an_unknown_choice(choice: object) -> None:
    with pytest.raises(UsageError, match="tool_choice must be"):
        constraint(with_template(templates.HERMES), TOOLS, choice)


def test_a_choice_of_a_tool_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="'later', which is not among the tools"):
        constraint(with_template(templates.HERMES), TOOLS, {"type": "function", "function": {"name": "later"}})


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "at least one"),
        ("f", "must be a list"),
        ([{"function": {"name": "f"}}], r"tools\[0\] must be an object"),
        ([NOW, {"type": "function", "function": {"name": "a b"}}], r"tools\[1\]: a name is 1 to 64"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], "schema of an object"),
        ([{"type": "function", "function": {"name": "f", "parameters": 3}}], "schema of an object"),
        ([NOW, NOW], "two tools are named 'now'"),
    ],
)
def test_bad_tools(tools: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_tools(tools)


def test_a_tool_whose_schema_cannot_be_kept_to() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
    spec = constraint(with_template(templates.HERMES), [bad], "required")
    with pytest.raises(SamplingParamsError, match="not is not supported"):
        source.grammar_of(spec)  # type: ignore[arg-type]


def test_formats_are_told_by_the_template() -> None:
    assert format_of(with_template(templates.HERMES)).name == "hermes"
    assert format_of(with_template(templates.LLAMA)).name == "llama"
    for source_, error in ((templates.PLAIN, UsageError), (None, UsageError), (templates.XML, UnsupportedModelError)):
        with pytest.raises(error):
            format_of(with_template(source_))


def test_a_parser_for_a_model() -> None:
    content, (found,) = ToolCallParser.for_model(with_template(templates.HERMES), TOOLS).parse(f"So: {HERMES_WEATHER}")
    assert (content, found.name, json.loads(found.arguments)) == ("So:", "weather", {"city": "Paris"})
    assert found.id.startswith("call_")
    other = HERMES_NOW.replace("now", "later")
    assert ToolCallParser.for_model(with_template(templates.HERMES), TOOLS).parse(other) == (other, [])


# -- in prompts --------------------------------------------------------------------------------------------------------


def test_tools_and_calls_are_rendered_as_the_model_writes_them() -> None:
    text = ChatTemplate(templates.HERMES, {}).render(TALK, tools=TOOLS)
    assert json.dumps(WEATHER) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\nwarm<|im_end|>" in text


def test_llama_renders_one_call() -> None:
    text = ChatTemplate(templates.LLAMA, {}).render(TALK, tools=TOOLS)
    assert text.startswith("Environment: ipython")
    assert '{"name": "weather", "parameters": {"city": "Köln"}}<|eot_id|>ipython\nwarm' in text
    two = [{**CALLED, "tool_calls": CALLED["tool_calls"] * 2}]  # type: ignore[operator]
    with pytest.raises(UsageError, match="single tool-calls"):
        ChatTemplate(templates.LLAMA, {}).render(two)


def test_an_assistant_without_calls_is_rendered_as_such() -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": []}
    assert ChatTemplate(templates.LLAMA, {}).render([message]) == "assistant\nHi<|eot_id|>"


def test_arguments_that_are_not_json_come_back_as_they_were() -> None:
    broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": tru'}}]}
    assert json.dumps('{"a": tru') in ChatTemplate(templates.HERMES, {}).render([broken])


def test_a_template_without_a_place_for_tools_refuses_them() -> None:
    with pytest.raises(UsageError, match="no place for tools"):
        ChatTemplate(templates.PLAIN, {}).render([{"role": "user", "content": "Hi"}], tools=TOOLS)


@pytest.mark.parametrize("call", [3, {}, {"function": {}}, {"function": {"name": 3}}])
def test_a_broken_call_in_a_message(call: object) -> None:
    with pytest.raises(UsageError, match="a tool call is a dict"):
        ChatTemplate(templates.HERMES, {}).render([{"role": "assistant", "content": "", "tool_calls": [call]}])
