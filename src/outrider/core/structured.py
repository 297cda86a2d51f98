"""What a request's output must look like: a JSON schema, a regular expression, a grammar, or one of some texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outrider.core.errors import SamplingParamsError, UnknownNameError

MAX_CHARS = 65_536
"""Longest specification. What a grammar costs to compile grows with its length, and a server takes it from anyone."""


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on the whole output; exactly one field is set. Validated when built; raises SamplingParamsError.

    json: a JSON schema, as an object or as text; the output is a JSON value that it describes.
    json_object: true: the output is any JSON object.
    regex: a regular expression; it matches the whole output.
    grammar: a context-free grammar in GBNF (llama.cpp's EBNF), starting at the rule ``root``.
    choice: the output is one of these texts.
    structural_tag: text between tags, in xgrammar's structural-tag format, as an object or as text.

    Whether a schema, an expression or a grammar can be used is found out when it is compiled (`outrider.grammar`).
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    structural_tag: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise SamplingParamsError(f"structured_outputs: json_object is true or false, not {self.json_object!r}")
        given = [f.name for f in fields(self) if getattr(self, f.name) is not f.default]
        if len(given) != 1:
            what = f"not {' and '.join(given)}" if given else "and none is set"
            names = ", ".join(f.name for f in fields(self))
            raise SamplingParamsError(f"structured_outputs takes exactly one of {names}, {what}")
        self._normalise(given[0])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StructuredOutputs:
        """Build from plain keys; an unknown key raises UnknownNameError, naming the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UnknownNameError("structured_outputs key", key, known)
        return cls(**values)

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not f.default)

    def _normalise(self, kind: str) -> None:
        """Bring the field into one hashable form: objects become JSON text, lists tuples."""
        value: Any = getattr(self, kind)
        if kind in ("json", "structural_tag"):
            value = _as_json_text(kind, value, (dict, bool) if kind == "json" else (dict,))
        elif kind == "choice":
            value = _as_choice(value)
        elif kind != "json_object" and (not isinstance(value, str) or not value):
            raise SamplingParamsError(f"structured_outputs: {kind} must be a text that is not empty, not {value!r}")
        object.__setattr__(self, kind, value)
        text = "".join(value) if isinstance(value, tuple) else str(value)
        if len(text) > MAX_CHARS:
            raise SamplingParamsError(f"structured_outputs: {kind} has {len(text)} characters; {MAX_CHARS} are allowed")
        if "\0" in text:
            raise SamplingParamsError(f"structured_outputs: {kind} holds a NUL character, which cannot be asked for")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise SamplingParamsError(f"structured_outputs: {kind} is not valid Unicode (lone surrogates)") from None


def _as_json_text(kind: str, value: Any, types: tuple[type, ...]) -> str:
    """``value``, JSON text or what it stands for, as JSON text."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else value
        # An order of properties is the order in which they are written: keys must not be sorted.
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SamplingParamsError(f"structured_outputs: {kind} is not valid JSON: {reason}") from None
    if not isinstance(parsed, types):
        raise SamplingParamsError(f"structured_outputs: {kind} must be a JSON object, not {text[:40]}")
    return text


def _as_choice(value: Any) -> tuple[str, ...]:
    texts = None if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) else tuple(value)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise SamplingParamsError("structured_outputs: choice must be a list of texts, none of them empty")
    return texts
