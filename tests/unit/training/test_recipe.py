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
    ("words", "model", "runs"),
    [
        (
            (),
            "smollm2-135m",
            [
                ("eagle3", "first", "prompts.jsonl"),
                ("mtp", "mtp", "first/answers.jsonl"),
                ("medusa", "medusa", "first/answers.jsonl"),
                ("eagle3", "eagle3", "more.jsonl"),
            ],
        ),
        (("qwen2.5-coder-1.5b",), "qwen2.5-coder-1.5b", [("eagle3", "eagle3", "prompts.jsonl")]),
    ],
)
def test_every_drafter_is_trained_with_options_that_there_are(
    words: tuple[str, ...], model: str, runs: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, commands, said = run(tmp_path, *words, "--exclude", "measured.jsonl")
    assert (code, said) == (0, "")
    prompts = [command for command in commands if command[0] == "python"]
    assert all(command[-2:] == ["--exclude", "measured.jsonl"] for command in prompts)
    written = {command[command.index("--out") + 1] for command in prompts}
    assert written == {str(out / data) for _, _, data in runs if "/" not in data}
    parsed = [build_parser("train").parse(command[1:]) for command in commands if command[0] == "outrider"]
    assert [(args.method, args.out, args.data) for args in parsed] == [
        (method, out / folder, [out / data]) for method, folder, data in runs
    ]
    assert all(args.model_argument == model for args in parsed)
    assert [args.init_from for args in parsed[3:]] == [out / "first"] * len(parsed[3:])


def test_a_model_without_a_recipe(tmp_path: Path) -> None:
    code, commands, said = run(tmp_path, "llama")
    assert (code, commands) == (2, [])
    assert "no recipe for llama" in said
