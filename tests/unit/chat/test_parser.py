"""Tool calls are read alike whole and in pieces, and what turns out to be none is text again."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.chat.formats import HERMES, LLAMA, ToolFormat
from outrider.chat.parser import CallPiece, CallStart, ContentPiece, Event, ToolCallParser

NESTED = {"text": 'a "quoted" \\ </tool_call> {[}] 日本 🎉', "list": [{"x": None}, 1.5e3], "empty": {}}


def call(form: ToolFormat, name: str, arguments: object) -> str:
    return form.begin(json.dumps(name)) + json.dumps(arguments, ensure_ascii=False) + form.end


def gather(events: Iterable[Event]) -> tuple[str, list[tuple[str, str]]]:
    """Content and (name, arguments) of each call; every call starts once, in order, before its arguments."""
    content = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ContentPiece):
            assert event.text
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        else:
            assert isinstance(event, CallPiece)
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    return content, calls


def streamed(form: ToolFormat, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(form)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return gather([*events, *parser.finish()])


def parsed(form: ToolFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    content, calls = ToolCallParser(form).parse(text)
    result = content, [(own.name, own.arguments) for own in calls]
    assert streamed(form, text) == result
    assert len({own.id for own in calls}) == len(calls)
    return result


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=lambda form: form.name)
@pytest.mark.parametrize("arguments", [{}, {"city": "Paris"}, NESTED])
def test_one_call(form: ToolFormat, arguments: object) -> None:
    content, calls = parsed(form, call(form, "look_up", arguments))
    assert content == ""
    assert [(name, json.loads(text)) for name, text in calls] == [("look_up", arguments)]


def test_calls_among_text() -> None:
    text = f"I will look.\n\n{call(HERMES, 'f', NESTED)}\n{call(HERMES, 'g', {})}\nand that is all. "
    content, calls = parsed(HERMES, text)
    assert content == "I will look.and that is all. "
    assert [name for name, _ in calls] == ["f", "g"]


def test_llama_calls_in_a_row_and_after_its_tag() -> None:
    text = f"<|python_tag|>{call(LLAMA, 'f', {'a': 1})}; {call(LLAMA, 'g', {})}"
    assert parsed(LLAMA, text) == ("", [("f", '{"a": 1}'), ("g", "{}")])
    assert parsed(LLAMA, "  \n" + call(LLAMA, "f", {})) == ("", [("f", "{}")])
    assert parsed(LLAMA, '{"type": "function", "name": "f", "parameters": {}}') == ("", [("f", "{}")])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{ "name" : "\\u0066" , "arguments" : { "a" :\n1 } }', '{ "a" :\n1 }'),
    ],
)
def test_other_ways_to_write_a_call(written: str, arguments: str) -> None:
    assert parsed(HERMES, f"<tool_call>{written}</tool_call>") == ("", [("f", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Just text. ",
        "a <b> < c <tool",
        "text  <tool_call> no call",
        "<tool_call>\n[1]\n</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": ',
        '<tool_call>{"na',
        '<tool_call>{"answer": 42}</tool_call>',
        "<tool_call> ",
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert parsed(HERMES, text) == (text, [])


@pytest.mark.parametrize(
    "text", ['{"answer": 42}', "{ }", '{"name": "f", "x', "{", "Hi {", " \n", "<|python_tag|>print(1)"]
)
def test_what_is_no_call_is_text_for_llama(text: str) -> None:
    assert parsed(LLAMA, text) == (text, [])


def test_after_broken_calls_good_ones_are_found() -> None:
    text = f'<tool_call>oops</tool_call> <tool_call>{{"x"<tool_call> {call(HERMES, "f", {})}'
    content, calls = parsed(HERMES, text)
    assert content == '<tool_call>oops</tool_call> <tool_call>{"x"<tool_call>'
    assert calls == [("f", "{}")]


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", '{"a": "b'),
        ('<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>', "", '{"a": tru}'),
        ('<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>x', "x", '{"a": [1}}'),
        ('<tool_call>{"name": "f", "arguments": {}} and so</tool_call>', "and so</tool_call>", "{}"),
        ('<tool_call>{"name": "f", "arguments": {}}', "", "{}"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool', "", "{}"),
    ],
)
def test_a_call_that_has_begun_stays_one(text: str, content: str, arguments: str) -> None:
    assert parsed(HERMES, text) == (content, [("f", arguments)])


def test_calls_of_tools_that_there_are_not() -> None:
    text = call(LLAMA, "f", {"a": 1})
    assert ToolCallParser(LLAMA, frozenset({"g"})).parse(text) == (text, [])
    assert ToolCallParser(LLAMA, frozenset({"f"})).parse(text)[1][0].name == "f"


def test_names_come_first_and_arguments_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.feed('Hm. <tool_call>\n{"name": "f", ') == [ContentPiece("Hm.")]
    start, piece = parser.feed('"arguments": {"a"')
    assert isinstance(start, CallStart)
    assert (start.name, piece) == ("f", CallPiece(0, '{"a"'))
    assert parser.parse("whole") == ("whole", [])
    assert parser.feed(": 1}") == [CallPiece(0, ": 1}")]
    assert parser.feed("}\n</tool_call>") == parser.finish() == []


SHREDS = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "<",
                "{",
                "}",
                '"',
                "\\",
                ",",
                ":",
                " ",
                "\n",
                ";",
                "[",
                "]",
                "x",
                "日本🎉",
            ),
            *(
                '"name"',
                '"arguments": ',
                '"parameters": ',
                '"f"',
                '{"name": "f", "arguments": {',
                "<|python_tag|>",
                "1",
            ),
        ]
    ),
    max_size=25,
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(form=st.sampled_from([HERMES, LLAMA]), shreds=SHREDS, cuts=st.lists(st.integers(1, 9), max_size=40))
def test_pieces_make_no_difference(form: ToolFormat, shreds: list[str], cuts: list[int]) -> None:
    text = "".join(shreds)
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    whole = parsed(form, text)
    assert streamed(form, [*pieces, rest]) == whole
    if not whole[1]:
        assert whole[0] == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    form=st.sampled_from([HERMES, LLAMA]),
    calls=st.lists(
        st.tuples(st.from_regex(r"[a-zA-Z0-9_-]{1,9}", fullmatch=True), st.dictionaries(st.text(), json_values)),
        min_size=1,
        max_size=3,
    ),
    indent=st.sampled_from([None, 2]),
)
def test_any_calls_come_back(form: ToolFormat, calls: list[tuple[str, dict[str, object]]], indent: int | None) -> None:
    written = [form.begin(json.dumps(n)) + json.dumps(a, indent=indent) + form.end for n, a in calls]
    content, found = parsed(form, form.separator.join(written))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
