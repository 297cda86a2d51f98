"""Constraints are checked when they are built: exactly one, of the right type, in one line."""

from __future__ import annotations

import pytest

from outrider.core.errors import SamplingParamsError, UnknownNameError
from outrider.core.sampling import SamplingParams
from outrider.core.structured import MAX_CHARS, StructuredOutputs


@pytest.mark.parametrize(
    ("values", "kind", "normal"),
    [
        ({"json": {"type": "object", "b": 1, "a": "ü"}}, "json", '{"type": "object", "b": 1, "a": "ü"}'),
        ({"json": ' {"type":"object"}'}, "json", '{"type": "object"}'),
        ({"json": True}, "json", "true"),
        ({"json_object": True}, "json_object", True),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"structural_tag": {"type": "x"}}, "structural_tag", '{"type": "x"}'),
    ],
)
def test_one_form_for_each_kind(values: dict[str, object], kind: str, normal: object) -> None:
    spec = StructuredOutputs.from_dict(values)
    assert (spec.kind, getattr(spec, kind)) == (kind, normal)
    assert hash(spec) == hash(StructuredOutputs.from_dict({kind: normal}))
    assert SamplingParams(structured_outputs=values).structured_outputs == spec  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of .*, and none is set"),
        ({"json_object": False}, "and none is set"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of .*, not regex and choice"),
        ({"json_object": "yes"}, "true or false"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": "[]"}, "must be a JSON object"),
        ({"json": 3}, "must be a JSON object"),
        ({"json": {"a": float("nan")}}, "not valid JSON"),
        ({"json": {"a": {1, 2}}}, "not valid JSON"),
        ({"json": "[" * 60_000}, "json is not valid JSON"),
        ({"structural_tag": True}, "must be a JSON object"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": 3}, "regex must be a text"),
        ({"grammar": b"root"}, "grammar must be a text"),
        ({"choice": []}, "list of texts, none of them empty"),
        ({"choice": "abc"}, "list of texts"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["a", 3]}, "list of texts"),
        ({"regex": "a" * (MAX_CHARS + 1)}, f"{MAX_CHARS} are allowed"),
        ({"choice": ["a" * 999] * 99}, f"{MAX_CHARS} are allowed"),
        ({"regex": "\ud800"}, "lone surrogates"),
        ({"choice": ["a\0b"]}, "NUL character"),
        ({"json": {"const": "\ud800"}}, "lone surrogates"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message) as caught:
        StructuredOutputs.from_dict(values)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'regex'"):
        StructuredOutputs.from_dict({"regexp": "a"})


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(SamplingParamsError, match="structured_outputs must be an object"):
        SamplingParams(structured_outputs="a+")  # type: ignore[arg-type]
    with pytest.raises(SamplingParamsError, match="ignore_eos would pass over"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)
