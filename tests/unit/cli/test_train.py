"""``outrider train`` from the command line to the drafter, on a small random model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import LLM, SamplingParams
from outrider.cli.main import main
from outrider.cli.train import BAD_LINES, STATES, _bar
from outrider.core.config import EngineConfig
from outrider.executors.native import why_unavailable
from outrider.heads.load import load_head
from outrider.models.loader import Model
from outrider.train import curves, disk
from outrider.train.prepare import ANSWERS, OWN
from tests.support.training import use_wordy_model

QUESTIONS = ["Who jumps over the dog?", "Is the fox quick?", "Where is the dog?", "How lazy is it?"]
ANSWERED = [{"role": "user", "content": "And who is lazy?"}, {"role": "assistant", "content": "The dog, they say."}]
TEXTS = [
    f"The quick brown fox jumps over {number} lazy dogs, and over {number * 7} quoted words." for number in range(16)
]
LINES = [
    *({"prompt": question} for question in QUESTIONS),
    {"messages": ANSWERED},
    *({"text": text} for text in TEXTS),
    {"txt": "this is of no use"},
]
SMALL = [
    *("--draft-vocab", "64", "--batch-tokens", "128", "--draft-steps", "2"),
    *("--held-out", "0.2", "--measurements", "2"),
]
WRITTEN = ["--answer-tokens", "16", "--self-synthesize", "4", "--question-tokens", "40"]

Train = Callable[..., int]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    return use_wordy_model(monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "{broken\n")
    return path


def train(*words: object, method: str = "eagle3") -> int:
    options = ["--executor", "worded", "--dtype", "float32", "--threads", "1", "--method", method]
    return main(["train", *options, *map(str, words)])


def texts_of(data: Path) -> Path:
    """The lines of ``data`` that the target need not answer."""
    path = data.with_name("texts.jsonl")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def drafter(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_from_data_and_from_nothing_to_a_drafter(
    model: Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train("--data", data, "--out", out, *WRITTEN, *SMALL) == 0
    shown = capsys.readouterr()
    assert "2 lines of the data cannot be used:\n  data.jsonl, line 22: none of messages, " in shown.err
    assert "  data.jsonl, line 23: not JSON" in shown.err
    assert "estimated acceptance length of a chain: " in shown.out
    assert 0 < (out / ANSWERS).read_text().count("\n") <= 4
    assert (out / OWN).read_text().count("\n") == 4
    head = load_head(out, model.config, model.name)
    assert head.method == "eagle3"
    assert head.draft_ids is not None
    assert len(head.draft_ids) == 64
    assert json.loads((out / "curves.json").read_text())["held_out"]


def test_all_bad_lines_are_in_a_file(
    model: Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = texts_of(data)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(good.read_text() + "{broken\n" * 7)
    out = tmp_path / "out"
    assert train("--data", bad, "--out", out, *SMALL) == 0
    shown = capsys.readouterr().err
    named = (out / BAD_LINES).read_text().splitlines()
    assert [line.split(":")[0] for line in named] == [f"bad.jsonl, line {len(TEXTS) + n}" for n in range(1, 8)]
    listed = "".join(f"  {line}\n" for line in named[:5])
    assert f"7 lines of the data cannot be used:\n{listed}  and 2 more; all of them are in {out / BAD_LINES}" in shown
    assert train("--data", good, "--out", out, *SMALL, "--restart") == 0
    assert not (out / BAD_LINES).exists()


def test_without_matplotlib_the_curves_are_numbers_and_that_is_said_once(
    model: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", texts_of(data), *SMALL, "--out"]
    assert train(*words, tmp_path / "drawn") == 0
    shown = capsys.readouterr()
    assert "matplotlib" not in shown.err
    assert f"loss by update: {tmp_path / 'drawn' / 'curves.png'}" in shown.out
    assert (tmp_path / "drawn" / "curves.png").exists()
    monkeypatch.setattr(curves.importlib.util, "find_spec", lambda name: None)
    assert train(*words, tmp_path / "out") == 0
    shown = capsys.readouterr()
    assert shown.err.count("outrider[plot]") == 1
    assert f"loss by update: {tmp_path / 'out' / 'curves.json'}" in shown.out
    assert not (tmp_path / "out" / "curves.png").exists()


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_how_much_there_is_and_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the work took half a minute, so the rest takes one and a half."""
    seconds = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: seconds)
    monkeypatch.setattr("sys.stderr", Terminal())
    with _bar("hidden states", 40, "token") as step:
        seconds += 30
        step(10)
        shown = sys.stderr.getvalue().split("\r")[-1]  # type: ignore[attr-defined]
    assert shown.startswith("hidden states:  25%|")
    assert "10/40 [00:30<01:30" in shown


def test_elsewhere_a_line_at_the_end_says_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    with _bar("answers", 9, "conversation", 4) as step:
        step(5)
    assert re.fullmatch(r"answers: 5 conversations in .* s, .* a second\n", capsys.readouterr().err)


def test_the_same_command_again_does_nothing_anew(
    model: Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", data, "--out", tmp_path / "out", *WRITTEN, *SMALL]
    assert train(*words) == 0
    files = [tmp_path / "out" / name for name in (ANSWERS, OWN, "model.safetensors", f"{STATES}/states-00000.bin")]
    before = [file.read_bytes() for file in files]
    assert "hidden states: " in capsys.readouterr().err
    assert train(*words) == 0
    assert [file.read_bytes() for file in files] == before
    assert "hidden states: " not in capsys.readouterr().err


def test_the_disk_budget_changes_nothing_but_the_disk(
    model: Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, budget in (("all", "1GiB"), ("none", "0"), ("some", "40kB")):
        assert train("--data", data, "--out", tmp_path / name, *SMALL, "--disk-budget", budget, "--epochs", 2) == 0
    assert drafter(tmp_path / "all") == drafter(tmp_path / "none") == drafter(tmp_path / "some")
    assert list((tmp_path / "none" / STATES).glob("*.bin")) == []
    assert 0 < (tmp_path / "some" / STATES / "states-00000.bin").stat().st_size <= 40_000
    assert "are over the disk budget, and are computed again in every epoch" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["eagle", "medusa", "mtp"])
def test_every_method(method: str, model: Model, data: Path, tmp_path: Path) -> None:
    assert train("--data", data, "--out", tmp_path / "out", *SMALL, method=method) == 0
    assert load_head(tmp_path / "out", model.config, model.name).method == method


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_on_the_native_executor_about_the_same_is_learned(model: Model, data: Path, tmp_path: Path) -> None:
    """From the command to text in the engine; the torch executor is the oracle."""
    learned = {}
    for executor, dtype in (("native", "auto"), ("torch", "float32")):
        words = ["--executor", executor, "--dtype", dtype, "--threads", "1", "--method", "eagle3", "--epochs", "4"]
        words += ["--data", str(texts_of(data)), *SMALL, "--out", str(tmp_path / executor)]
        assert main(["train", *words]) == 0
        learned[executor] = json.loads((tmp_path / executor / "curves.json").read_text())["held_out"]
    native, oracle = ([point["loss"] for point in learned[name]] for name in ("native", "torch"))
    assert native == pytest.approx(oracle, rel=0.002)
    assert native[-1] < native[0] - 0.02
    sizes = EngineConfig(max_context=128)
    plain = LLM(model, "none", executor="native", engine_config=sizes, threads=1)
    head = {"method": "eagle3", "model": str(tmp_path / "native"), "num_speculative_tokens": 8, "adaptive": False}
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[5, 9, 12], [30, 31, 32, 33]]
    expected = plain.generate(prompts, params, use_tqdm=False)
    outputs = plain.with_speculation(head).generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert all(output.statistics.drafted > 0 and output.statistics.failures == 0 for output in outputs)


def test_questions_are_answered_anew_on_request(model: Model, data: Path, tmp_path: Path) -> None:
    assert train("--data", data, "--out", tmp_path / "out", "--regenerate", "--answer-tokens", 16, *SMALL) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / ANSWERS).read_text().splitlines()]
    asked = [line["messages"][0]["content"] for line in lines]
    assert asked == [question for question in [*QUESTIONS, "And who is lazy?"] if question in asked]
    assert "And who is lazy?" in asked
    assert "The dog, they say." not in (tmp_path / "out" / ANSWERS).read_text()


def test_an_existing_drafter_is_gone_on_from(
    model: Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train("--data", data, "--out", first, *SMALL) == 0
    own = [word for word in SMALL if word not in ("--draft-vocab", "64")]
    assert train("--data", data, "--out", second, "--init-from", first, *own) == 0
    learned = [json.loads((folder / "curves.json").read_text())["held_out"] for folder in (first, second)]
    assert learned[1][0]["loss"] == pytest.approx(learned[0][-1]["loss"], rel=0.02)
    capsys.readouterr()
    assert train("--data", data, "--out", second, "--init-from", first, *SMALL) == 2
    assert "draft_vocab is for a new drafter" in capsys.readouterr().err
    assert train("--data", data, "--out", second, "--init-from", first, *own, method="mtp") == 2
    assert "is a drafter of method 'eagle3'; give --method eagle3" in capsys.readouterr().err


def test_a_checkpoint_of_other_data_is_told_of_and_can_be_left(
    model: Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train("--data", data, "--out", out, *SMALL) == 0
    assert train("--data", data, "--out", out, *SMALL, "--epochs", 2) == 2
    assert "or start anew with --restart" in capsys.readouterr().err
    assert train("--data", data, "--out", out, *SMALL, "--epochs", 2, "--restart") == 0


def test_a_checkpoint_of_another_method_is_told_of_before_hidden_states_are_computed(
    model: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train("--data", data, "--out", out, *SMALL) == 0
    kept = {path.name: path.read_bytes() for path in (out / "states").iterdir()}
    assert train("--data", data, "--out", out, *SMALL, method="mtp") == 2
    assert "the checkpoint is of another drafter or target" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (out / "states").iterdir()} == kept


def test_a_checkpoint_of_a_target_with_other_weights_is_not_gone_on_from(
    model: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", texts_of(data), "--out", tmp_path / "out", *SMALL]
    assert train(*words) == 0
    assert use_wordy_model(monkeypatch, seed=1).config == model.config
    assert train(*words) == 2
    assert "of a target with other weights" in (error := capsys.readouterr().err)
    assert "or start anew" in error
    assert train(*words, "--restart") == 0


def test_a_checkpoint_that_began_with_another_drafter_is_not_gone_on_from(
    model: Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", texts_of(data), *SMALL[2:], "--out"]
    for seed in (1, 2):
        assert train(*words, tmp_path / f"head{seed}", "--draft-vocab", 0, "--seed", seed) == 0
    assert train(*words, tmp_path / "out", "--init-from", tmp_path / "head1") == 0
    shutil.copytree(tmp_path / "head1", tmp_path / "copy")
    assert train(*words, tmp_path / "out", "--init-from", tmp_path / "copy") == 0
    capsys.readouterr()
    for other in (["--init-from", tmp_path / "head2"], ["--draft-vocab", 0]):
        assert train(*words, tmp_path / "out", *other) == 2
        assert "the checkpoint began with another drafter; " in (error := capsys.readouterr().err)
        assert "or start anew" in error


def test_a_nearly_full_disk_is_said_and_ends_it(
    model: Model, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk.KEPT_FREE - 1))
    assert train("--data", data, "--out", tmp_path / "out", *SMALL) == 1
    error = capsys.readouterr().err
    assert "is nearly full" in error
    assert "run the same command again" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to train on: give --data FILE, --self-synthesize N, or both"),
        (["--data", "nowhere.jsonl"], "cannot read the data in nowhere.jsonl: there is no such file"),
        (["--data", "DATA", "--max-length", "3"], "max_length=3 must be from 8 to the model's 256 tokens"),
        (["--data", "DATA", "--max-length", "300"], "max_length=300 must be from 8 to the model's 256 tokens"),
        (["--self-synthesize", "-1"], "self_synthesize=-1 must be a whole number of at least 0"),
        (["--data", "DATA", "--greedy-share", "1.5"], "greedy_share=1.5 must be from 0 to 1"),
        (["--data", "DATA", "--temperature", "inf"], "temperature=inf must be at least 0"),
        (["--data", "DATA", "--disk-budget", "much"], "disk_budget='much' must be a number of bytes"),
        (["--data", "TEXT", "--writers", "3"], "writers is for answers that the target writes, and there are none"),
        (["--data", "DATA", "--question-tokens", "9"], "question_tokens is for questions that the target writes"),
        (["--data", "TEXT", "--regenerate"], "regenerate is for conversations, and there are none in the data"),
        (["--data", "EMPTY"], "holds nothing to learn from (there is not one line)"),
        (["--data", "BAD"], "holds nothing to learn from (bad.jsonl, line 1: not JSON"),
        (["--data", "DATA", "--num-heads", "3"], "num_heads is for medusa; eagle3 would ignore it"),
        (["--data", "DATA", "--init-from", "nowhere"], "nowhere"),
        (["--data", "DATA", "--epochs", "0"], "epochs=0 must be a whole number of at least 1"),
    ],
)
def test_what_cannot_work_is_one_clear_line(
    words: list[str], message: str, model: Model, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"DATA": data, **{name: tmp_path / f"{name.lower()}.jsonl" for name in ("TEXT", "EMPTY", "BAD")}}
    files["TEXT"].write_text(json.dumps({"text": TEXTS[0]}))
    files["EMPTY"].write_text("\n")
    files["BAD"].write_text("{")
    assert train(*(files.get(word, word) for word in words), "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert message in error[0]


STOPPED = """
import signal, sys
import pytest
from outrider.train import loop
from tests.support.training import use_wordy_model
from tests.unit.cli.test_train import train
due = loop._Run.save_if_due
def told(self):
    if self.progress.update == 2:
        signal.raise_signal(signal.SIGTERM)
    due(self)
loop._Run.save_if_due = told
with pytest.MonkeyPatch.context() as patch:
    use_wordy_model(patch)
    sys.exit(train(*sys.argv[1:]))
"""


def test_a_signal_ends_it_and_the_same_command_goes_on(model: Model, data: Path, tmp_path: Path) -> None:
    words = ["--data", str(data), *SMALL, "--epochs", "2", "--out"]
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, *words, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "the same command goes on from there" in done.stderr
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert train(*words, tmp_path / "out") == 0
    assert train(*words, tmp_path / "whole") == 0
    assert drafter(tmp_path / "out") == drafter(tmp_path / "whole")


KILLED = """
import os, signal, sys
import pytest
from outrider.train import features, journal, optimizer
from tests.support.training import use_wordy_model
from tests.unit.cli.test_train import train
place, name, count = {
    "answers": (journal.Journal, "keep", 3),
    "states": (features.Shards, "append", 2),
    "updates": (optimizer.Optimizers, "step", 4),
}[sys.argv[1]]
action = getattr(place, name)
features.ROWS = 128  # so few tokens that there are several steps
def counted(*args, **more):
    global count
    count -= 1
    if not count:
        os.kill(os.getpid(), signal.SIGKILL)
    return action(*args, **more)
setattr(place, name, counted)
with pytest.MonkeyPatch.context() as patch:
    use_wordy_model(patch)
    train(*sys.argv[2:])
"""


def test_a_kill_in_any_phase_changes_nothing(model: Model, data: Path, tmp_path: Path) -> None:
    """While the target answers, while hidden states are written, and amid an update."""
    words = ["--data", str(data), "--answer-tokens", "16", *SMALL, "--epochs", "2", "--checkpoint-minutes", "0"]
    out = tmp_path / "out"
    left = {"answers": ANSWERS, "states": f"{STATES}/states-00000.bin", "updates": "checkpoint.pt"}
    for phase, file in left.items():
        command = [sys.executable, "-c", KILLED, phase, *words, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert (out / file).stat().st_size > 0
        assert not (out / "model.safetensors").exists()
    assert train(*words, "--out", out) == 0
    assert train(*words, "--out", tmp_path / "whole") == 0
    assert (out / ANSWERS).read_bytes() == (tmp_path / "whole" / ANSWERS).read_bytes()
    assert drafter(out) == drafter(tmp_path / "whole")
