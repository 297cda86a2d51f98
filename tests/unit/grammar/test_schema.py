"""JSON schemas: what is let through is kept to, and what would not be is refused by name."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from outrider.core.errors import SamplingParamsError
from outrider.core.structured import StructuredOutputs
from outrider.grammar import source
from outrider.grammar.schema import check_schema

KEPT = [
    ({"type": "integer", "multipleOf": 5}, [5, -10], [7]),
    ({"type": "integer", "multipleOf": 1024}, [2048], [2049]),
    ({"type": "integer", "minimum": -5, "maximum": 400}, [-5, 400], [-6, 401]),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 4}, [2, 3], [1, 4]),
    ({"type": "number", "minimum": 1.5, "maximum": 2.5}, [2.0, 2], [1, 3]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["b"]),
    ({"type": "string", "format": "date"}, ["2020-01-01"], ["x"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc", 1]),
    ({"type": "string", "enum": ["a", "b"]}, ["a"], ["c"]),
    ({"enum": ["a", 1, None]}, ["a", 1, None], ["b"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        [[1, 2]],
        [[1], [1, 2, 3, 4], ["a", 1]],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [[1, "a"]], [["a", 1]]),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        [{"a": 1}],
        [{}, {"a": "x"}, {"a": 1, "b": 2}],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        [{"a": 1, "b": "x"}],
        [{"a": "x"}, {"b": 1}],
    ),
    (
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
        [{"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, [{"a": 1}], [{"a": "x"}]),
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": True},
        [{"a": 1}],
        [{"A": 1}],
    ),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["ab", 1], [1.5]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["ab", 1], [1.5]),
    ({"oneOf": [{"const": 1}, {"enum": [2, 3]}]}, [1, 3], [4]),
    ({"allOf": [{"type": "string"}]}, ["ab"], [1]),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}}},
        [[], [[[]]]],
        [[1], [[], []]],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": name}, name: {"type": "integer"}}, "required": ["k"]}
                for name in ("x", "y")
            ]
        },
        [{"k": "x", "x": 1}, {"k": "y"}],
        [{"k": "x", "y": 1}, {"k": "z"}],
    ),
    ({"type": "object", "title": "T", "description": "d", "default": {}, "x-own": 1, "uniqueItems": False}, [{}], [1]),
]

REFUSED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
    ({"not": {"type": "string"}}, "not is not supported"),
    ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "if is not supported"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains is not supported"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired is not supported"),
    ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, "allOf of several"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf whose branches may overlap"),
    ({"oneOf": [{"type": "string"}, {}]}, "oneOf whose branches may overlap"),
    ({"type": "string", "anyOf": [{"maxLength": 1}]}, "type beside anyOf"),
    ({"$ref": "#/$defs/a", "maxLength": 2}, "maxLength beside"),
    ({"type": "string", "enum": ["a", 1]}, "type beside enum"),
    ({"type": "string", "pattern": "a", "maxLength": 2}, "pattern with maxLength"),
    ({"type": "string", "format": "date", "minLength": 2}, "format with minLength"),
    ({"type": "string", "format": "regex"}, "format 'regex' is not supported; supported are date"),
    ({"type": "number", "multipleOf": 0.5}, "integers only"),
    ({"type": ["integer", "number"], "multipleOf": 5}, "integers only"),
    ({"type": "integer", "multipleOf": 5, "minimum": 1}, "multipleOf with minimum"),
    ({"type": "integer", "multipleOf": 2048}, "a whole number from 1 to 1024"),
    ({"type": "integer", "multipleOf": 2.5}, "a whole number from 1 to 1024"),
    ({"type": "string", "pattern": "a$b"}, r"\$ at position 1"),
    ({"type": "object", "patternProperties": {"a\\Z": True}}, r"escape \\Z"),
    ({"minimum": 3}, 'minimum needs "type": "number"'),
    ({"maxLength": 3}, 'maxLength needs "type": "string"'),
    ({"$ref": "http://example.com/schema"}, r"\$ref must point into the schema"),
    ({"type": "object", "properties": {"a": {}}, "required": ["a", "z"]}, "required names 'z'"),
    ({"type": "object", "properties": {"a": {"items": {"not": {}}}}}, "#/properties/a/items: not"),
    ({"$defs": {"n": {"anyOf": [{}, {"minLength": 1}]}}}, r"#/\$defs/n/anyOf/1: minLength"),
]


@cache
def compiler() -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b""], stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info)


def fits(compiled: Any, text: str) -> bool:
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize(("schema", "good", "bad"), KEPT)
def test_what_is_let_through_is_kept_to(schema: dict[str, Any], good: list[object], bad: list[object]) -> None:
    compiled = compiler().compile_grammar(source.grammar_of(StructuredOutputs(json=schema)))
    for value in good:
        assert fits(compiled, json.dumps(value)), value
    for value in bad:
        assert not fits(compiled, json.dumps(value)), value


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_what_would_not_be_kept_to_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message) as caught:
        check_schema(schema)
    assert "\n" not in str(caught.value)


def test_any_json_object() -> None:
    compiled = compiler().compile_grammar(source.grammar_of(StructuredOutputs(json_object=True)))
    for value in ({}, {"a": [1, {"b": None}], "c": "d"}):
        assert fits(compiled, json.dumps(value))
        assert fits(compiled, json.dumps(value, indent=4))
    for text in ("[]", "1", "{", '{"a":' + " " * 40 + "1}"):
        assert not fits(compiled, text)
