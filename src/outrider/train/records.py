"""Conversations and texts from JSONL, in the forms in which they are passed around.

A line is an object with one of these: ``messages`` (OpenAI's form), ``conversations`` (ShareGPT's), ``turns`` (what a
user says, turn by turn, without answers), ``prompt`` with or without ``response`` or ``completion``, ``instruction``
with or without ``input`` and ``output``, or ``text``. Lines that are none of it are counted and named, and never stop
the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import UsageError

Message = dict[str, str]
"""``role`` and ``content``."""

_ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "function": "tool"}


@dataclass(frozen=True)
class Conversation:
    """Turns of a chat. complete: the last answer was ended by its author, not by a limit on its length."""

    messages: tuple[Message, ...]
    complete: bool = True

    @property
    def unanswered(self) -> bool:
        """Whether there is no answer in it at all."""
        return all(message["role"] != "assistant" for message in self.messages)

    @property
    def uses_tools(self) -> bool:
        """Whether a tool speaks in it."""
        return any(message["role"] == "tool" for message in self.messages)


@dataclass(frozen=True)
class Text:
    """Plain text, without a chat template around it."""

    text: str


Record = Conversation | Text


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used. file, number: where it is, lines from 1."""

    file: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}: {self.reason}"


@dataclass(frozen=True)
class Line:
    """A line with what it holds."""

    file: str
    number: int
    record: Record

    def bad(self, reason: str) -> BadLine:
        """This line, as one that cannot be used."""
        return BadLine(self.file, self.number, reason)


def read_lines(path: Path) -> Iterator[Line | BadLine]:
    """Every line that is not blank. Raises UsageError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _read_line(path.name, number, line)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def to_line(messages: tuple[Message, ...], **more: Any) -> str:
    """A conversation as one line of JSONL, line end included. more: further keys, before the messages."""
    return json.dumps({**more, "messages": list(messages)}, ensure_ascii=False) + "\n"


def _read_line(file: str, number: int, line: bytes) -> Line | BadLine:
    try:
        value = json.loads(line.decode("utf-8"))
        if not isinstance(value, dict):
            raise _UnusableError("not a JSON object")
        return Line(file, number, _to_record(value))
    except UnicodeDecodeError:
        return BadLine(file, number, "not UTF-8")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadLine(file, number, f"not JSON ({error})")
    except _UnusableError as error:
        return BadLine(file, number, str(error))


class _UnusableError(Exception):
    """Why a line is of no use."""


def _to_record(value: dict[str, Any]) -> Record:
    for key, read in _READERS.items():
        if key in value:
            return read(value)
    keys = ", ".join(map(repr, list(value)[:5])) or "none"
    raise _UnusableError(f"none of {', '.join(_READERS)} among its keys ({keys})")


def _messages(value: dict[str, Any]) -> Conversation:
    turns = [_message(entry, "role", "content") for entry in _list(value, "messages")]
    complete = value.get("complete", True)
    if not isinstance(complete, bool):
        raise _UnusableError("'complete' is not true or false")
    return _conversation(turns, complete)


def _sharegpt(value: dict[str, Any]) -> Conversation:
    return _conversation([_message(entry, "from", "value") for entry in _list(value, "conversations")])


def _turns(value: dict[str, Any]) -> Conversation:
    return _conversation([_user(_filled(turn, "'turns'")) for turn in _list(value, "turns")])


def _prompt(value: dict[str, Any]) -> Conversation:
    return _pair(_filled(value["prompt"], "'prompt'"), value, ("response", "completion"))


def _instruction(value: dict[str, Any]) -> Conversation:
    said = _filled(value["instruction"], "'instruction'")
    if value.get("input"):
        said += "\n\n" + _filled(value["input"], "'input'")
    return _pair(said, value, ("output", "response"))


def _text(value: dict[str, Any]) -> Text:
    return Text(_filled(value["text"], "'text'"))


_READERS: Mapping[str, Callable[[dict[str, Any]], Record]] = {
    "messages": _messages,
    "conversations": _sharegpt,
    "turns": _turns,
    "prompt": _prompt,
    "instruction": _instruction,
    "text": _text,
}
"""Key that tells the form -> how it is read. The first that a line has counts."""


def _pair(said: str, value: dict[str, Any], answers: tuple[str, ...]) -> Conversation:
    turns = [_user(said)]
    for key in answers:
        if value.get(key) is not None:
            turns.append({"role": "assistant", "content": _filled(value[key], repr(key))})
            break
    return _conversation(turns)


def _conversation(turns: list[Message], complete: bool = True) -> Conversation:
    if not any(message["role"] == "user" for message in turns):
        raise _UnusableError("nobody asks anything: no message of a user")
    return Conversation(tuple(turns), complete)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _message(entry: Any, role_key: str, content_key: str) -> Message:
    if not isinstance(entry, dict) or not isinstance(entry.get(role_key), str):
        raise _UnusableError(f"a message is not an object with {role_key!r} and {content_key!r}")
    role = _SHAREGPT.get(entry[role_key], entry[role_key])
    if role not in _ROLES:
        raise _UnusableError(f"a message of unknown role {entry[role_key]!r}")
    return {"role": role, "content": _content(entry.get(content_key), f"{content_key!r} of the role {role!r}")}


def _content(value: Any, what: str) -> str:
    """A text, also where it comes as a list of parts, as in OpenAI's API."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        value = "".join(str(part.get("text", "")) for part in value)
    return _filled(value, what)


def _list(value: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(value[key], list) or not value[key]:
        raise _UnusableError(f"{key!r} is not a list, or is empty")
    found: list[Any] = value[key]
    return found


def _filled(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _UnusableError(f"{what} is not a text")
    if not value.strip():
        raise _UnusableError(f"{what} is empty")
    return value
