from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.bench.methods import parse_methods
from outrider.bench.prompts import Prompt
from outrider.bench.runner import Run, Settings, run
from outrider.cli.main import main
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter, DrafterContext
from outrider.engine import runtime
from outrider.engine.llm import LLM
from tests.support.fake_llm import fake_llm, repetitive_logits, use_fakes
from tests.support.fakes import random_logits

PROMPTS = [
    Prompt("a/1", "a", ("one", "two")),
    Prompt("b/1", "b", ("three",)),
]


def measured(methods: str, prompts: Sequence[Prompt] = PROMPTS, **params: object) -> Run:
    settings = Settings(SamplingParams(**{"max_tokens": 12, "seed": 7, **params}))  # type: ignore[arg-type]
    return run(fake_llm("none"), parse_methods(methods), prompts, settings)


def test_every_method_answers_every_turn_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch, repetitive_logits)
    result = measured("none,ngram,suffix", temperature=0.6)
    assert len(result.rows) == 3 * 3
    assert all(row.identical for row in result.rows)
    assert not result.failures
    assert not result.interrupted


def test_the_order_rotates_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    result = measured("none,ngram,suffix")
    assert [row.method for row in result.rows] == [
        *("none", "ngram", "suffix"),
        *("ngram", "suffix", "none"),
        *("suffix", "none", "ngram"),
    ]
    assert [row.order for row in result.rows] == [0, 1, 2] * 3


def test_later_turns_follow_the_references_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    result = measured("none,ngram")
    plain = fake_llm("none")
    messages = [{"role": "user", "content": "one"}]
    first = plain.chat(messages, SamplingParams(max_tokens=12))[0]
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "two"}]
    second = plain.chat(messages, SamplingParams(max_tokens=12))[0]
    found = [row.output for row in result.rows if row.prompt_id == "a/1" and row.turn == 1]
    assert [answer.prompt_token_ids for answer in found] == [second.prompt_token_ids] * 2
    assert [answer.token_ids for answer in found] == [second.token_ids] * 2


def test_each_turn_has_a_seed_of_its_own_the_same_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    result = measured("none,ngram", temperature=1.0)
    assert [row.output.seed for row in result.rows] == [7, 7, 8, 8, 9, 9]


def test_a_failure_is_recorded_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    prompts = [Prompt("long/1", "a", ("x" * 300, "never said")), *PROMPTS]
    result = measured("none,ngram", prompts)
    assert [(f.prompt_id, f.turn, f.method) for f in result.failures] == [("long/1", 0, "none"), ("long/1", 0, "ngram")]
    assert result.failures[0].error.startswith("ContextLengthError: ")
    assert len(result.rows) == 2 * 3


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    original = LLM.chat

    def tampered(self: LLM, *args: object, **kwargs: object) -> object:
        outputs = original(self, *args, **kwargs)  # type: ignore[arg-type]
        if self.speculative_config.method == "ngram":
            outputs[0].token_ids[3] += 1
        return outputs

    monkeypatch.setattr(LLM, "chat", tampered)
    result = measured("none,ngram")
    assert [row.identical for row in result.rows if row.method == "ngram"] == [False] * 3
    assert {row.first_difference for row in result.rows if row.method == "ngram"} == {3}
    assert all(row.identical for row in result.rows if row.method == "none")


def test_ctrl_c_ends_the_run_and_keeps_what_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def logits(history: Sequence[int]) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 80:
            signal.raise_signal(signal.SIGINT)
        return random_logits(history)

    use_fakes(monkeypatch, logits)
    result = measured("none", [Prompt(f"a/{i}", "a", ("hi",)) for i in range(20)], ignore_eos=True)
    assert result.interrupted
    assert 0 < len(result.rows) < 20
    assert all(row.output.finish_reason == "length" for row in result.rows)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": p.id, "category": p.category, "turns": p.turns}) + "\n" for p in PROMPTS))
    return path


def bench(path: Path, *words: str) -> int:
    options = ["--executor", "fake", "--max-context", "256", "--prompts", str(path), "--max-tokens", "12"]
    return main(["bench", "some-model", *options, "--output", str(path.with_name("results.json")), *words])


def test_bench_prints_and_saves(
    prompt_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch, repetitive_logits)
    monkeypatch.setattr("outrider.bench.machine.read_bandwidth", lambda: 1e9)
    figure = prompt_file.with_name("figure.png")
    assert bench(prompt_file, "--methods", "none,ngram", "--categories", "a", "--plot", str(figure)) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert "overall" in out
    assert "saved" in err
    record = json.loads(prompt_file.with_name("results.json").read_text())
    assert record["configuration"]["model"] == "some-model"
    assert record["configuration"]["methods"]["ngram"]["method"] == "ngram"
    assert record["machine"]["cpu"]
    assert record["machine"]["read_bytes_per_second_before"] == record["machine"]["read_bytes_per_second_after"] == 1e9
    assert record["versions"]["torch"]
    assert {row["category"] for row in record["rows"]} == {"a"}
    assert [s["identical"] for s in record["summary"]] == [s["compared"] for s in record["summary"]]
    assert record["baseline"] == "none"
    for row in record["rows"]:
        found = row["speculation"]
        outcomes = found["rounds_by_draft"]
        assert sum(rounds for _, _, rounds in outcomes) == found["rounds"]
        assert sum(nodes * rounds for nodes, _, rounds in outcomes) == found["drafted"]
        assert sum(kept * rounds for _, kept, rounds in outcomes) == found["accepted"]
    assert any(row["speculation"]["accepted"] for row in record["rows"])


def test_bench_builds_each_drafter_once(prompt_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr("outrider.bench.machine.read_bandwidth", lambda: 1e9)
    built: list[str] = []
    real = runtime.build

    def counted(context: DrafterContext) -> Drafter:
        built.append(context.config.method)
        return real(context)

    monkeypatch.setattr(runtime, "build", counted)
    assert bench(prompt_file, "--methods", "ngram,suffix", "--categories", "a") == 0
    assert built.count("ngram") == built.count("suffix") == 1


def test_bench_tells_of_failures(
    prompt_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr("outrider.bench.machine.read_bandwidth", lambda: 1e9)
    assert bench(prompt_file, "--methods", "none", "--system", "y" * 300) == 1
    assert "failed: a/1, turn 0, none: ContextLengthError" in capsys.readouterr().err
    record = json.loads(prompt_file.with_name("results.json").read_text())
    assert len(record["failures"]) == 2
    assert record["rows"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "none,sufix"], "did you mean 'suffix'?"),
        (["--methods", "none,draft_model"], "needs --draft-model"),
        (["--categories", "c"], "unknown prompt category 'c'"),
        (["--limit", "0"], "--limit=0"),
        (["--output", "/dev/null/x/results.json"], "cannot write"),
        (["--plot", "figure.jpeg"], "must end in .png"),
        (["--prompts", "missing.jsonl"], "cannot read the prompts"),
    ],
)
def test_bad_input(
    words: list[str],
    message: str,
    prompt_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_fakes(monkeypatch)
    assert bench(prompt_file, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
