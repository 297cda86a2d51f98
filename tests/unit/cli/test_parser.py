from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest

from outrider.cli.main import build_parser
from outrider.cli.parser import Parser, add_fields, field_help, given
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.serve.config import ServerConfig

OPTIONS_OF_THEIR_OWN = ("structured_outputs",)
"""Fields that are several options on the command line (see `outrider.cli.options.add_structured`)."""


def parsed(cls: type[Any], *words: str) -> dict[str, Any]:
    parser = Parser(prog="test")
    add_fields(parser.add_argument_group("fields"), cls, "x", leave_out=OPTIONS_OF_THEIR_OWN)
    return given(parser.parse(words), "x")


@pytest.mark.parametrize("cls", [SamplingParams, SpeculativeConfig, EngineConfig, ServerConfig])
def test_every_field_has_an_option_with_help(cls: type[Any]) -> None:
    names = [item.name for item in fields(cls)]
    assert set(field_help(cls)) == set(names)
    assert all(field_help(cls).values())
    parser = Parser(prog="test")
    add_fields(parser.add_argument_group("fields"), cls, "x", leave_out=OPTIONS_OF_THEIR_OWN)
    assert {"--" + name.replace("_", "-") for name in names if name not in OPTIONS_OF_THEIR_OWN} <= set(
        parser.option_names()
    )


def test_options_that_are_not_used_set_nothing() -> None:
    assert parsed(SamplingParams) == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--temperature", "0.8"], {"temperature": 0.8}),
        (["--top-k", "5"], {"top_k": 5}),
        (["--max-tokens", "none"], {"max_tokens": None}),
        (["--max-tokens", "9"], {"max_tokens": 9}),
        (["--stop", "a,b", "--stop", "c"], {"stop": ["a,b", "c"]}),
        (["--stop-token-ids", "1,2"], {"stop_token_ids": (1, 2)}),
        (["--logit-bias", "3=-1.5,4=2"], {"logit_bias": {3: -1.5, 4: 2.0}}),
        (["--ignore-eos"], {"ignore_eos": True}),
        (["--no-skip-special-tokens"], {"skip_special_tokens": False}),
    ],
)
def test_values_have_the_type_of_their_field(words: Sequence[str], expected: dict[str, Any]) -> None:
    assert parsed(SamplingParams, *words) == expected
    SamplingParams(**expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temprature", "1"], "did you mean --temperature?"),
        (["--temperatur", "1"], "did you mean --temperature?"),
        (["--temperature", "warm"], "'warm' is not a number"),
        (["--top-k", "1.5"], "'1.5' is not a whole number"),
        (["--logit-bias", "3"], "ID=NUMBER"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(
    words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parsed(SamplingParams, *words)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        build_parser("genrate").parse(["genrate", "hi"])
    assert exit_.value.code == 2
    assert "did you mean 'generate'?" in capsys.readouterr().err


def test_a_field_without_a_command_line_form_is_refused() -> None:
    @dataclass(frozen=True)
    class Odd:
        """value: anything."""

        value: complex = 0j

    with pytest.raises(TypeError, match="complex"):
        add_fields(argparse.ArgumentParser().add_argument_group("fields"), Odd, "x")


def test_help_is_read_from_metadata_or_docstring() -> None:
    assert field_help(SpeculativeConfig)["method"].startswith("drafter:")
    assert "once per occurrence" in field_help(SamplingParams)["presence_penalty"]
    assert field_help(SamplingParams)["presence_penalty"] == field_help(SamplingParams)["frequency_penalty"]
    assert "result tells which" in field_help(SamplingParams)["seed"]
