"""Specifications in xgrammar's terms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from outrider.core.errors import SamplingParamsError
from outrider.grammar.ambiguity import fault_of_grammar
from outrider.grammar.expression import fault_of
from outrider.grammar.schema import check_schema
from outrider.grammar.vocabulary import xgrammar

if TYPE_CHECKING:
    from outrider.core.structured import StructuredOutputs

_LONGEST_WHITESPACE = 32
"""Characters of white space in a row between the parts of a JSON text. A small model may otherwise go on with nothing
but spaces until its tokens are used up, and the text would never become valid."""


def grammar_of(spec: StructuredOutputs) -> Any:
    """The ``xgrammar.Grammar`` of a specification. Raises what xgrammar raises, or SamplingParamsError."""
    return _KINDS[spec.kind](getattr(spec, spec.kind))


def _from_schema(text: str) -> Any:
    check_schema(json.loads(text))
    return xgrammar().Grammar.from_json_schema(text, max_whitespace_cnt=_LONGEST_WHITESPACE)


def _from_json_object(_: bool) -> Any:
    # Not strict: the keys of an object about which nothing is said may be any.
    return xgrammar().Grammar.from_json_schema(
        '{"type": "object"}', strict_mode=False, max_whitespace_cnt=_LONGEST_WHITESPACE
    )


def _from_regex(text: str) -> Any:
    fault = fault_of(text)
    if fault is not None:
        raise SamplingParamsError(f"structured_outputs: the regular expression cannot be kept to: {fault}")
    return _followed(xgrammar().Grammar.from_regex(text), "regular expression")


def _from_ebnf(text: str) -> Any:
    return _followed(xgrammar().Grammar.from_ebnf(text), "grammar")


def _followed(grammar: Any, what: str) -> Any:
    """The grammar, if its repetitions can be followed in time."""
    fault = fault_of_grammar(grammar)
    if fault is not None:
        raise SamplingParamsError(f"structured_outputs: in this {what}, {fault}")
    return grammar


def _from_choice(texts: tuple[str, ...]) -> Any:
    return xgrammar().Grammar.from_ebnf("root ::= " + " | ".join(f'"{quoted(text)}"' for text in texts))


def _from_structural_tag(text: str) -> Any:
    tag = json.loads(text)
    for schema in _parts_of(tag, "json_schema", "json_schema"):
        check_schema(schema)
    for expression in _parts_of(tag, "regex", "pattern"):
        _from_regex(expression)
    for grammar in _parts_of(tag, "grammar", "grammar"):
        _from_ebnf(grammar)
    return xgrammar().Grammar.from_structural_tag(text)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "json": _from_schema,
    "json_object": _from_json_object,
    "regex": _from_regex,
    "grammar": _from_ebnf,
    "choice": _from_choice,
    "structural_tag": _from_structural_tag,
}


def quoted(text: str) -> str:
    """``text`` as it stands between the quotation marks of a literal in GBNF."""
    escapes = {'"': '\\"', "\\": "\\\\", **{chr(code): f"\\u{code:04x}" for code in (*range(32), 127)}}
    return "".join(escapes.get(character, character) for character in text)


def _parts_of(tag: Any, kind: str, field: str) -> list[Any]:
    """What the parts of a type have in a field, wherever in a structural tag they are."""
    if isinstance(tag, dict):
        own = [tag[field]] if tag.get("type") == kind and field in tag else []
        inner = [part for key, part in tag.items() if key != "json_schema"]
        return own + [found for part in inner for found in _parts_of(part, kind, field)]
    return [found for part in tag for found in _parts_of(part, kind, field)] if isinstance(tag, list) else []
