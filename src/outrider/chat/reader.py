"""Reading one tool call, a JSON object, while it is being written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset(("name", "type", "id", *_ARGUMENTS))


class CallReader:
    """Takes ``{"name": "f", "arguments": {…}}`` a character at a time.

    It is a call from the moment when its name is known and its arguments have begun: `started`. What comes after that
    cannot make it undone, since whoever streams has passed the name on. Arguments are handed out as they were written;
    a model may write ones that are not valid JSON, as OpenAI's API warns as well.

    failed: this is no call. done: the call is over. unread: the last character did not belong to it.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """``names``: tools that there are; a call of any other is none. None: any name will do."""
        self.name: str | None = None
        self.started = False
        self.failed = False
        self.done = False
        self.unread = False
        self._names = names
        self._step: Callable[[str], None] = self._before_object
        self._key = ""
        self._text = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._streams = False
        self._arguments: str | None = None

    def push(self, character: str) -> None:
        """Read one character. Not to be called once the call is done or has failed."""
        self._step(character)
        if self.name is not None and self._arguments is not None:
            self.started = True

    def take(self) -> str:
        """Arguments that have come since the last call; nothing before `started`."""
        if not self.started or not self._arguments:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    def _unexpected(self) -> None:
        self.done, self.failed, self.unread = self.started, not self.started, True

    def _before_object(self, character: str) -> None:
        if character == "{":
            self._step = self._before_key
        elif character not in _SPACE:
            self._unexpected()

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._text, self._escaped, self._step = character, False, self._in_key
        elif character == "}":
            self._close()
        elif character not in _SPACE:
            self._unexpected()

    def _in_key(self, character: str) -> None:
        self._text += character
        if self._string_goes_on(character):
            return
        key = _value(self._text)
        if key not in _KEYS:
            self._unexpected()
        else:
            self._key, self._step = str(key), self._before_colon

    def _before_colon(self, character: str) -> None:
        if character == ":":
            self._step = self._before_value
        elif character not in _SPACE:
            self._unexpected()

    def _before_value(self, character: str) -> None:
        if character in _SPACE:
            return
        self._text, self._depth, self._in_string, self._escaped = "", 0, False, False
        self._streams = self._key in _ARGUMENTS and self._arguments is None and character == "{"
        if self._streams:
            self._arguments = ""
        self._step = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._in_string:
            self._in_string = self._string_goes_on(character)
            self._keep(character)
            if not self._in_string and self._depth == 0:
                self._end_value()
        elif character == "<":  # no JSON has it here: the model has broken off
            self._unexpected()
        elif self._depth == 0 and self._text and character in ",}]" + _SPACE:
            self._end_value()
            if not self.failed:
                self._step(character)
        else:
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            self._keep(character)
            if character in "}]" and self._depth <= 0:
                self._end_value()

    def _string_goes_on(self, character: str) -> bool:
        """Whether a string that holds ``character`` is still open after it."""
        closes = character == '"' and not self._escaped
        self._escaped = character == "\\" and not self._escaped
        return not closes

    def _keep(self, character: str) -> None:
        if self._streams:
            self._arguments = (self._arguments or "") + character
        else:
            self._text += character

    def _end_value(self) -> None:
        self._step = self._after_value
        if self._streams:
            self._streams = False
        elif self._key == "name" and self.name is None:
            name = _value(self._text)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                self._unexpected()
            else:
                self.name = name
        elif self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = _arguments(_value(self._text))
            if self._arguments is None:
                self._unexpected()

    def _after_value(self, character: str) -> None:
        if character == ",":
            self._step = self._before_key
        elif character == "}":
            self._close()
        elif character not in _SPACE:
            self._unexpected()

    def _close(self) -> None:
        if self.name is None:
            self._unexpected()
            return
        if self._arguments is None:
            self._arguments = "{}"
        self.done = True


def _value(text: str) -> Any:
    """A JSON value; None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arguments(value: Any) -> str | None:
    """Arguments that were not written as an object: as a string that holds one, or null. None: they are none."""
    if value is None:
        return "{}"
    return value if isinstance(value, str) and isinstance(_value(value), dict) else None
