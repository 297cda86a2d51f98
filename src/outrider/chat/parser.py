"""Telling a model's text and its tool calls apart, whole or as they come."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.chat.formats import ToolFormat, format_of
from outrider.chat.reader import CallReader

if TYPE_CHECKING:
    from outrider.models.loader import Model


@dataclass(frozen=True)
class ToolCall:
    """arguments: JSON text as the model wrote it; cut short where the text was."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ContentPiece:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins. index: number of the call in this answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallPiece:
    """More of the arguments of call ``index``."""

    index: int
    arguments: str


Event = ContentPiece | CallStart | CallPiece


class ToolCallParser:
    """Parses one answer. Give it the text with `feed`, piece by piece, then `finish`; or all at once with `parse`.

    How the text is cut into pieces makes no difference. White space between text and calls belongs to neither.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str] | None = None) -> None:
        """``names``: tools that there are; what looks like a call of another is text. None: any name will do."""
        self._form = form
        self._names = names
        self._calls = 0
        self._held = ""
        self._raw = ""
        self._reader = CallReader(names)
        self._after_call = False
        self._state: Callable[[str], str] = self._in_text if form.opening else self._at_start
        self._events: list[Event] = []

    @classmethod
    def for_model(cls, model: Model, tools: Any = None) -> ToolCallParser:
        """The parser for what this model writes. ``tools``: the request's, if calls of others are to be taken for text.

        Raises UsageError if the model knows no tools, UnsupportedModelError if it writes calls in another way.
        """
        from outrider.chat.tools import parse_tools

        names = None if tools is None else frozenset(tool.name for tool in parse_tools(tools))
        return cls(format_of(model), names)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Content and calls of a whole answer. Does not disturb an answer that is being fed."""
        parser = ToolCallParser(self._form, self._names)
        content: list[str] = []
        starts: list[CallStart] = []
        arguments: dict[int, str] = {}
        for event in [*parser.feed(text), *parser.finish()]:
            if isinstance(event, ContentPiece):
                content.append(event.text)
            elif isinstance(event, CallStart):
                starts.append(event)
            else:
                arguments[event.index] = arguments.get(event.index, "") + event.arguments
        calls = [ToolCall(start.id, start.name, arguments.get(start.index, "")) for start in starts]
        return "".join(content), calls

    def feed(self, text: str) -> list[Event]:
        """What the next piece of text has made certain."""
        while text:
            text = self._state(text)
        return self._taken()

    def finish(self) -> list[Event]:
        """The answer is over: what was held back because it could have become a call is content."""
        if self._reader.started and self._state == self._in_call:
            self._flush_call()
        elif self._state != self._at_end:
            self._content(self._raw + self._held)
        self._raw = self._held = ""
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # -- states: each takes what it can of the text, and returns the rest ----------------------------------------------

    def _in_text(self, text: str) -> str:
        """Content, until the opening of a call."""
        text = self._held + text
        at = text.find(self._form.opening) if self._form.opening else -1
        if at >= 0:
            self._held = ""
            end = len(text[:at].rstrip())
            self._content(text[:end])
            self._begin_call(text[end : at + len(self._form.opening)])
            return text[at + len(self._form.opening) :]
        keep = len(text) - _beginning_at_end(text, self._form.opening)
        keep = len(text[:keep].rstrip())
        self._content(text[:keep])
        self._held = text[keep:]
        return ""

    def _at_start(self, text: str) -> str:
        """Without an opening, a call is what begins like one at the beginning of the answer, or after another call."""
        self._held += text
        rest = self._held.lstrip(" \t\r\n;" if self._calls else None)
        for prefix in self._form.prefixes:
            if rest.startswith(prefix):
                rest = rest[len(prefix) :].lstrip()
            elif prefix.startswith(rest):
                return ""
        if not rest:
            return ""
        before, self._held = self._held[: len(self._held) - len(rest)], ""
        if rest[0] == "{":
            self._begin_call(before)
            return rest
        self._state = self._in_text
        return rest if self._calls else before + rest

    def _begin_call(self, raw: str) -> None:
        self._raw, self._reader, self._state = raw, CallReader(self._names), self._in_call

    def _in_call(self, text: str) -> str:
        for at, character in enumerate(text):
            reader = self._reader
            started = reader.started
            reader.push(character)
            if reader.failed:
                self._give_back()
                return text[at:]
            if reader.started and not started:
                self._start_call()
            if reader.done:
                self._flush_call()
                self._raw, self._state = "", self._at_end
                return text[at + (not reader.unread) :]
            if not reader.started:
                self._raw += character
        if self._reader.started:
            self._flush_call()
        return ""

    def _at_end(self, text: str) -> str:
        """After a call: its closing, which a model may forget."""
        self._held += text
        rest = self._held.lstrip()
        if self._form.closing and rest and rest.startswith(self._form.closing):
            rest = rest[len(self._form.closing) :]
        elif self._form.closing.startswith(rest) and self._form.closing:
            return ""
        self._held, self._after_call = "", True
        self._state = self._in_text if self._form.opening else self._at_start
        return rest

    # -- events --------------------------------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        self._events.append(ContentPiece(text))

    def _give_back(self) -> None:
        """What looked like a call is none: it is content, and so is what follows, up to the next opening."""
        end = len(self._raw.rstrip())
        self._content(self._raw[:end])
        self._held, self._raw = self._raw[end:], ""
        self._state = self._in_text

    def _start_call(self) -> None:
        assert self._reader.name is not None
        self._events.append(CallStart(self._calls, f"call_{secrets.token_hex(12)}", self._reader.name))
        self._calls += 1

    def _flush_call(self) -> None:
        arguments = self._reader.take()
        if arguments:
            self._events.append(CallPiece(self._calls - 1, arguments))


def _beginning_at_end(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` with which ``mark`` could begin."""
    return next((size for size in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
