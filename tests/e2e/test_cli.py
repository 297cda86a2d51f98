"""The command line on the real default model, each command as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.models.aliases import ALIASES
from outrider.models.fetch import fetch

MODEL = "smollm2-135m"
PATIENCE = 900.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    fetch(ALIASES[MODEL], progress=False)


def outrider(*words: str, typed: str | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *words],
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:outrider"},
    )
    assert done.returncode == code, done.stderr
    return done


def test_generate_answers() -> None:
    question = "What is the capital of France?"
    done = outrider("generate", question, "--executor", "torch", "--dtype", "float32", "--max-tokens", "8")
    assert "Paris" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "tokens/s" in done.stderr


def test_compare_shows_what_speculation_saved_and_that_the_text_is_the_same() -> None:
    prompt = "Repeat this sentence three times: the quick brown fox jumps over the lazy dog."
    words = ["--compare", "--max-tokens", "48"]
    done = outrider("generate", prompt, *words)
    assert done.stdout.rstrip().endswith("identical output: yes")
    assert "mean acceptance length" in done.stdout
    sampled = outrider("generate", prompt, *words, "--json", "--temperature", "0.8", "--top-p", "0.95", "--seed", "3")
    record = json.loads(sampled.stdout)
    assert record["identical"] is True
    assert record["plain"]["seed"] == record["speculative"]["seed"] == 3


def test_chat_remembers_what_was_said() -> None:
    turns = ["My name is Ada.", "What is my name?"]
    done = outrider("chat", MODEL, "--max-tokens", "12", typed="\n".join(turns) + "\n")
    assert done.stderr == ""
    llm = LLM(MODEL, "none")
    messages: list[dict[str, str]] = []
    expected = ""
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = llm.chat(messages, SamplingParams(max_tokens=12))[0].text
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert done.stdout == expected


def test_bench_measures_and_saves(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = outrider(
        *("bench", MODEL, "--methods", "none,suffix+recycle", "--categories", "qa,code_edit"),
        *("--limit", "1", "--max-tokens", "12", "--output", str(results)),
    )
    assert "overall" in done.stdout
    record = json.loads(results.read_text())
    assert len(record["rows"]) == 2 * 2
    assert record["failures"] == []
    assert all(row["identical"] for row in record["rows"])
    assert all(row["seconds"] > row["ttft"] > 0 for row in record["rows"])
    assert record["cost_curve"]["rows"][0] == 1


def test_memory_of_the_kv_cache_is_for_every_drafter_of_a_command(tmp_path: Path) -> None:
    """Bench has those of all its methods open at once; where nothing fits, one line says what it takes."""
    results = tmp_path / "results.json"
    outrider(
        *("bench", MODEL, "--methods", "none,auto,eagle3+suffix", "--categories", "qa", "--limit", "1"),
        *("--max-tokens", "4", "--kv-cache-memory", "32MiB", "--output", str(results)),
    )
    assert len(json.loads(results.read_text())["rows"]) == 3
    done = outrider("generate", "hi", "--model", MODEL, "--kv-cache-memory", "100kB", code=2)
    assert "does not hold one page of KV for the target and 1 of its drafters" in done.stderr
    assert done.stderr.count("\n") == 1


def test_bad_input_is_told_in_one_line() -> None:
    done = outrider("generate", "hi", "--model", "smollm2-135", code=2)
    assert done.stdout == ""
    assert "did you mean 'smollm2-135m'?" in done.stderr
    assert done.stderr.count("\n") == 1
