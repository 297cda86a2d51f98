"""Constrained output of a real model: valid, and the same tokens with every drafter."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from outrider import LLM, RequestOutput, SamplingParams, StructuredOutputs
from outrider.executors.native import why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["old", "young", "tall"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}
REGEX = r"[a-z]{3,10}@[a-z]{3,10}\.(com|org)"
SPECS = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=REGEX),
    StructuredOutputs(choice=["yes", "no", "日本"]),
]
PROMPT = "Describe a person, then give the mail address. Answer in JSON: "
DRAFT = {"model": "smollm2-135m", "num_speculative_tokens": 6, "adaptive": False}


@cache
def model() -> LLM:
    return LLM("smollm2-135m", "none", executor="native")


def params() -> list[SamplingParams]:
    free = SamplingParams(max_tokens=20, temperature=0.8, seed=7)
    return [
        free,
        *(
            SamplingParams(max_tokens=80, structured_outputs=spec, temperature=temperature, seed=3)
            for spec in SPECS
            for temperature in (0.0, 0.9)
        ),
    ]


@cache
def plain() -> list[RequestOutput]:
    return [model().generate(PROMPT, own)[0] for own in params()]


def fits(value: Any) -> bool:
    """Whether a parsed answer is what `SCHEMA` describes, checked by hand."""
    return (
        isinstance(value, dict)
        and list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"old", "young", "tall"}
    )


def check(output: RequestOutput, own: SamplingParams) -> None:
    spec = own.structured_outputs
    if spec is None:
        return
    assert output.finish_reason == "stop", output.text
    if spec.json is not None:
        assert fits(json.loads(output.text)), output.text
    elif spec.regex is not None:
        assert re.fullmatch(REGEX, output.text), output.text
    else:
        assert output.text in ("yes", "no", "日本")


def test_plain_answers_are_valid() -> None:
    for output, own in zip(plain(), params(), strict=True):
        check(output, own)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "auto"},
        {"method": "ngram", "num_speculative_tokens": 6, "adaptive": False},
        {"method": "draft_model", **DRAFT},
        {"method": "draft_model+suffix", **DRAFT, "tree_width": 2},
    ],
    ids=lambda config: config["method"],
)
def test_no_drafter_changes_a_token(config: dict[str, Any]) -> None:
    outputs = model().with_speculation(config).generate([PROMPT] * len(params()), params(), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain()]
    assert sum(output.statistics.accepted for output in outputs) > 0


@pytest.mark.parametrize(("rule", "width"), [("rejection", 2), ("block", 1)])
def test_other_rules_keep_the_form(rule: str, width: int) -> None:
    config = {"method": "draft_model", **DRAFT, "acceptance": rule, "tree_width": width}
    outputs = model().with_speculation(config).generate([PROMPT] * len(params()), params(), use_tqdm=False)
    for output, own in zip(outputs, params(), strict=True):
        check(output, own)
    # The model drafts for itself: p and q are equal, masks included, and nothing drafted first is ever rejected.
    for output in outputs[1:]:
        assert output.statistics.accepted_by_position[0] == output.statistics.drafted_rounds
