"""What of a JSON schema cannot be kept to is refused, by name.

xgrammar passes over the keywords that it does not know how to build into a grammar, with a warning at best; the output
would then not be what the schema asks for. (Found by trying each keyword with values that it rules out, xgrammar
0.2.9; the tests try them again.) A schema's own vocabulary may be extended, so unknown keywords are ignored, as JSON
Schema says they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from outrider.core.errors import SamplingParamsError
from outrider.grammar.ambiguity import fault_of_regex
from outrider.grammar.expression import fault_of

_NEVER = (
    *("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems"),
    *("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef"),
)
"""Keywords that no grammar here keeps to."""

_NEED_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that are kept to only where ``type`` names what they are about."""

_CONSTRAINTS = frozenset(
    (
        *("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"),
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
        *("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
        *_NEED_TYPE["string"],
        *_NEED_TYPE["number"],
    )
)
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords next to which other constraints are passed over."""

_FORMATS = frozenset(
    (
        *("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    )
)
_LARGEST_STEP = 1024
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")


def check_schema(schema: Any) -> None:
    """Raise SamplingParamsError for the first thing in ``schema`` (parsed JSON) that would not be kept to."""
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        where, part = waiting.pop()
        if isinstance(part, Mapping):
            _check(where, part)
            waiting.extend(_parts(where, part))


def _parts(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from ((f"{where}/{key}/{name}", part) for name, part in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"{where}/{key}/{number}", part) for number, part in enumerate(schema[key]))
    for key in _SINGLE:
        yield f"{where}/{key}", schema.get(key)
    if isinstance(schema.get("propertyNames"), Mapping):  # names are strings, said or not
        yield f"{where}/propertyNames", {"type": "string", **schema["propertyNames"]}


def _refuse(where: str, what: str) -> NoReturn:
    raise SamplingParamsError(f"structured_outputs: the JSON schema at {where}: {what}")


def _check(where: str, schema: Mapping[str, Any]) -> None:
    for key in _NEVER:
        if schema.get(key) not in (None, False):
            _refuse(where, f"{key} is not supported")
    types = _types(schema)
    _check_alone(where, schema, types)
    for kind, keys in _NEED_TYPE.items():
        named = kind in types or (kind == "number" and "integer" in types)
        for key in keys:
            if key in schema and not named:
                _refuse(where, f'{key} needs "type": "{kind}" beside it')
    if "multipleOf" in schema:
        _check_multiple(where, schema, types)
    _check_strings(where, schema)
    _check_required(where, schema)


def _check_multiple(where: str, schema: Mapping[str, Any], types: tuple[str, ...]) -> None:
    if "integer" not in types or "number" in types:
        _refuse(where, "multipleOf is supported for integers only")
    step = schema["multipleOf"]
    if step != 0 and not (isinstance(step, int) and 1 <= step <= _LARGEST_STEP):  # 0 is told what is wrong with it
        _refuse(where, f"multipleOf must be a whole number from 1 to {_LARGEST_STEP}")
    for bound in _NEED_TYPE["number"]:
        if bound in schema and bound != "multipleOf":
            _refuse(where, f"multipleOf with {bound} is not supported; keep one of them")


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    value = schema.get("type", ())
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()


def _check_alone(where: str, schema: Mapping[str, Any], types: tuple[str, ...]) -> None:
    for key in _ALONE:
        if key not in schema:
            continue
        others = (_CONSTRAINTS & set(schema)) - {key}
        if key in ("enum", "const"):
            values = schema["enum"] if key == "enum" and isinstance(schema["enum"], list) else [schema[key]]
            if types and all(any(_is_a(value, kind) for kind in types) for value in values):
                others -= {"type"}
        if others:
            _refuse(where, f"{sorted(others)[0]} beside {key} is not supported; put it inside")
    if len(schema.get("allOf", ())) > 1:
        _refuse(where, "allOf of several schemas is not supported; merge them into one")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        _refuse(where, f"$ref must point into the schema itself, not to {reference!r}")
    branches = schema.get("oneOf", ())
    if any(not _disjoint(a, b) for i, a in enumerate(branches) for b in branches[:i]):
        _refuse(where, "oneOf whose branches may overlap is not supported; give them different types, or use anyOf")


def _check_strings(where: str, schema: Mapping[str, Any]) -> None:
    given = [key for key in ("pattern", "format") if key in schema]
    length = [key for key in ("minLength", "maxLength") if key in schema]
    if len(given) + bool(length) > 1:
        _refuse(where, f"{' with '.join([*given, *length][:2])} is not supported; keep one of them")
    for text in (schema.get("pattern"), *(schema.get("patternProperties") or ())):
        fault = fault_of(text) or fault_of_regex(text) if isinstance(text, str) else None
        if fault is not None:
            _refuse(where, f"pattern {text!r}: {fault}")
    if "format" in schema and schema["format"] not in _FORMATS:
        _refuse(where, f"format {schema['format']!r} is not supported; supported are {', '.join(sorted(_FORMATS))}")


def _check_required(where: str, schema: Mapping[str, Any]) -> None:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in known:
            _refuse(where, f"required names {name!r}, which is not among the properties")


def _is_a(value: Any, kind: str) -> bool:
    """Whether a JSON value has the type that a schema calls ``kind``."""
    if isinstance(value, bool):
        return kind == "boolean"
    python = {"string": str, "object": dict, "array": list, "null": type(None), "integer": int, "number": (int, float)}
    return kind in python and isinstance(value, python[kind])  # type: ignore[arg-type]


def _disjoint(a: Any, b: Any) -> bool:
    """Whether no value can fit both schemas: other types, other constants, or a required key with other constants."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return False
    left, right = _constants(a), _constants(b)
    if left is not None and right is not None:
        return not any(value in right for value in left)
    ours, theirs = ({"number" if t == "integer" else t for t in _types(s)} for s in (a, b))
    if ours and theirs and not ours & theirs:
        return True
    return ours == theirs == {"object"} and any(
        _told_apart(a["properties"][key], b["properties"][key])
        for key in set(a.get("required", ())) & set(b.get("required", ()))
        if key in a.get("properties", {}) and key in b.get("properties", {})
    )


def _told_apart(a: Any, b: Any) -> bool:
    left, right = (_constants(part) if isinstance(part, Mapping) else None for part in (a, b))
    return left is not None and right is not None and not any(value in right for value in left)


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None
