"""``training/make.sh`` asks for what the commands really take, and lays the results where they are shipped from."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from outrider.cli.main import build_parser

RECIPE = Path(__file__).resolve().parents[3] / "training" / "make.sh"
STUB = '#!/bin/sh\necho {name} "$@" >> {log}\n'


def run(tmp_path: Path, *words: str) -> tuple[int, list[list[str]], str]:
    """Exit code, the commands that were run, and what was said."""
    log = tmp_path / "log"
    for name in ("python", "outrider"):
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(STUB.format(name=name, log=log))
        stub.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(RECIPE), str(tmp_path / "out"), *words],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    commands = [shlex.split(line) for line in log.read_text().splitlines()] if log.exists() else []
    return done.returncode, commands, done.stderr


@pytest.mark.parametrize(
    ("words", "model", "methods"),
    [
        ((), "smollm2-135m", ["eagle3", "mtp", "medusa"]),
        (("qwen2.5-coder-1.5b",), "qwen2.5-coder-1.5b", ["eagle3"]),
    ],
)
def test_every_drafter_is_trained_with_options_that_there_are(
    words: tuple[str, ...], model: str, methods: list[str], tmp_path: Path
) -> None:
    code, commands, said = run(tmp_path, *words, "--exclude", "measured.jsonl")
    assert (code, said) == (0, "")
    (prompts, *trained) = commands
    assert prompts[0] == "python"
    assert prompts[-2:] == ["--exclude", "measured.jsonl"]
    parsed = [build_parser("train").parse(command[1:]) for command in trained]
    assert [args.method for args in parsed] == methods
    for args in parsed:
        assert args.model_argument == model
        assert args.out == tmp_path / "out" / args.method
    assert parsed[0].data == [tmp_path / "out" / "prompts.jsonl"]
    assert all(args.data == [tmp_path / "out" / "eagle3" / "answers.jsonl"] for args in parsed[1:])


def test_a_model_without_a_recipe(tmp_path: Path) -> None:
    code, commands, said = run(tmp_path, "llama")
    assert (code, commands) == (2, [])
    assert "no recipe for llama" in said
