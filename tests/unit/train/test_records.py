"""Every form of JSONL line, and every way in which one can be of no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import UsageError
from outrider.train.records import BadLine, Conversation, Line, Text, read_lines, to_line

ASKED = {"role": "user", "content": "why?"}
ANSWERED = {"role": "assistant", "content": "so."}


def read(tmp_path: Path, *lines: Any) -> list[Line | BadLine]:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return list(read_lines(path))


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [ASKED, ANSWERED]},
        {"id": 3, "messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "so."}]}]},
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}]},
        {"prompt": "why?", "response": "so."},
        {"prompt": "why?", "completion": "so."},
        {"instruction": "why?", "input": "", "output": "so."},
    ],
)
def test_forms_of_a_conversation(tmp_path: Path, line: dict[str, Any]) -> None:
    assert read(tmp_path, line) == [Line("data.jsonl", 1, Conversation((ASKED, ANSWERED)))]


def test_an_instruction_with_its_input(tmp_path: Path) -> None:
    [line] = read(tmp_path, {"instruction": "translate", "input": "so.", "output": "also."})
    assert isinstance(line, Line)
    assert isinstance(line.record, Conversation)
    assert line.record.messages[0] == {"role": "user", "content": "translate\n\nso."}


def test_questions_alone_are_unanswered(tmp_path: Path) -> None:
    lines = read(tmp_path, {"prompt": "why?"}, {"turns": ["why?", "why not?"]}, {"instruction": "do it"})
    records = [line.record for line in lines if isinstance(line, Line)]
    assert [isinstance(record, Conversation) and record.unanswered for record in records] == [True] * 3
    assert not Conversation((ASKED, ANSWERED)).unanswered


def test_text_and_blank_lines(tmp_path: Path) -> None:
    assert read(tmp_path, b"", {"text": "so it goes"}, b"  ", {"text": "on"}) == [
        Line("data.jsonl", 2, Text("so it goes")),
        Line("data.jsonl", 4, Text("on")),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{broken", "not JSON"),
        (b'"text"', "not a JSON object"),
        (b'{"text": "\xff"}', "not UTF-8"),
        ({"txt": "so"}, "none of messages, conversations, turns, prompt, instruction, text among its keys ('txt')"),
        ({}, "among its keys (none)"),
        ({"text": 3}, "'text' is not a text"),
        ({"text": " \n"}, "'text' is empty"),
        ({"prompt": "why?", "response": ""}, "'response' is empty"),
        ({"messages": []}, "'messages' is not a list, or is empty"),
        ({"messages": "hi"}, "'messages' is not a list, or is empty"),
        ({"messages": ["hi"]}, "a message is not an object with 'role' and 'content'"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "unknown role 'judge'"),
        ({"messages": [{"role": "user"}]}, "'content' of the role 'user' is not a text"),
        ({"messages": [ANSWERED]}, "no message of a user"),
        ({"messages": [ASKED, ANSWERED], "complete": 1}, "'complete' is not true or false"),
        ({"turns": ["why?", None]}, "'turns' is not a text"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines_are_named_and_do_not_stop_the_rest(tmp_path: Path, line: Any, reason: str) -> None:
    first, second = read(tmp_path, line, {"text": "fine"})
    assert isinstance(first, BadLine)
    assert str(first).startswith("data.jsonl, line 1: ")
    assert reason in first.reason
    assert second == Line("data.jsonl", 2, Text("fine"))


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nowhere\.jsonl: No such file"):
        list(read_lines(tmp_path / "nowhere.jsonl"))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(to_line((ASKED, ANSWERED), id=7, complete=False), encoding="utf-8")
    assert list(read_lines(path)) == [Line("out.jsonl", 1, Conversation((ASKED, ANSWERED), complete=False))]
