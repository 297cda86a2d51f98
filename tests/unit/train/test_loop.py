"""The training loop: drafters learn, runs resume as if nothing had been, and what cannot work is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from outrider.core.errors import ConfigError, UsageError
from outrider.heads.load import load_head
from outrider.train import disk, loop
from outrider.train.config import TrainConfig
from outrider.train.identity import Origin
from outrider.train.modules import MODULES
from outrider.train.stop import TrainingStoppedError
from tests.support.drafting import CONFIG, ORIGIN, MemoryStore, small_module, small_target
from tests.support.heads import assert_same_head

ROOT = Path(__file__).resolve().parents[3]
train = partial(loop.train, origin=ORIGIN, show_progress=False)


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore(small_target(), 40)


@pytest.mark.parametrize("method", MODULES.names())
def test_a_drafter_learns(method: str, store: MemoryStore, tmp_path: Path) -> None:
    module = small_module(method, store)
    curves = train(store, module, replace(CONFIG, epochs=10), tmp_path)
    first, last = curves.held_out[0], curves.held_out[-1]
    assert last["loss"] < first["loss"] - 0.1
    assert last["accuracy"][0] > first["accuracy"][0] + 0.03
    assert last["acceptance_length"] > first["acceptance_length"] + 0.1
    assert [point["update"] for point in curves.held_out] == sorted({point["update"] for point in curves.held_out})
    assert curves.train[-1]["loss"] < curves.train[0]["loss"]
    head = load_head(tmp_path, store.model.config, "target")
    assert head.accept_by_depth == tuple(last["accuracy"])
    assert_same_head(replace(head, accept_by_depth=()), module.to_head())
    written = json.loads((tmp_path / "curves.json").read_text())
    assert written["held_out"] == curves.held_out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_bfloat16_learns_about_the_same(store: MemoryStore, tmp_path: Path) -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        module = small_module("eagle3", store, dtype)
        curves = train(store, module, CONFIG, tmp_path / str(dtype))
        losses.append(curves.held_out[-1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


# -- ending and going on ---------------------------------------------------------------------------------------------


def run(folder: Path, method: str, *where: str) -> int:
    command = [sys.executable, "-m", "tests.support.drafting", method, str(folder), *where]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.json", "curves.json")}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(folder, "eagle3") == 0
    return results(folder)


@pytest.mark.parametrize(
    "ends",
    [
        [("update", "1", "SIGKILL")],
        [("update", "9", "SIGKILL"), ("update", "5", "SIGKILL")],
        [("checkpoint", "7", "SIGKILL")],
        [("update", "8", "SIGTERM")],
    ],
    ids=["at-first", "twice", "while-writing", "terminated"],
)
def test_a_run_that_is_ended_goes_on_to_the_same_drafter(
    ends: Sequence[tuple[str, str, str]], unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    for end in ends:
        assert run(tmp_path, "eagle3", *end) not in (0, 2)
        assert not (tmp_path / "model.safetensors").exists()
    assert run(tmp_path, "eagle3") == 0
    assert results(tmp_path) == unbroken


def stop_after(updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run in this process be asked to stop by a signal."""
    learn = loop._Run.learn

    def counted(self: loop._Run, batch: object) -> dict[str, str]:
        if self.progress.update + 1 == updates:
            signal.raise_signal(signal.SIGINT)
        return learn(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(loop._Run, "learn", counted)


def test_a_signal_ends_the_update_and_keeps_it(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    stop_after(3, monkeypatch)
    config = replace(CONFIG, checkpoint_minutes=60.0)
    with pytest.raises(TrainingStoppedError, match="stopped after 3 of") as stopped:
        train(store, small_module("mtp", store), config, tmp_path)
    assert stopped.value.number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
    for change, text in ((replace(config, learning_rate=1e-3), "learning_rate=0.001"),):
        with pytest.raises(ConfigError, match=text):
            train(store, small_module("mtp", store), change, tmp_path)
    with pytest.raises(ConfigError, match="another drafter"):
        train(store, small_module("eagle", store), config, tmp_path)
    with pytest.raises(UsageError, match="other samples"):
        train(MemoryStore(store.model, 39), small_module("mtp", store), config, tmp_path)
    for other, text in ((Origin("tuned"), "a target with other weights"), (replace(ORIGIN, drafter="x"), "began with")):
        with pytest.raises(ConfigError, match=f"{text}.*, or start anew"):
            train(store, small_module("mtp", store), config, tmp_path, origin=other)


def test_a_full_disk_ends_the_run_with_a_checkpoint(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": disk.KEPT_FREE - 1}))
    config = replace(CONFIG, checkpoint_minutes=60.0)
    with pytest.raises(disk.DiskFullError, match="nearly full"):
        train(store, small_module("mtp", store), config, tmp_path)
    monkeypatch.undo()
    curves = train(store, small_module("mtp", store), config, tmp_path)
    whole = train(store, small_module("mtp", store), config, tmp_path / "whole")
    assert curves == whole


def test_a_broken_checkpoint_is_named(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"checkpoint\.pt is not a checkpoint"):
        train(store, small_module("mtp", store), CONFIG, tmp_path)
    train(store, small_module("mtp", store), CONFIG, tmp_path, resume=False)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    empty = MemoryStore(small_target(), 0)
    with pytest.raises(UsageError, match="no sample to train on"):
        train(empty, small_module("mtp", empty), CONFIG, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", True),
        ("batch_tokens", 1),
        ("draft_steps", 1.5),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("held_out", 0.9),
        ("clip", 0.0),
        ("step_decay", -1),
        ("seed", -1),
        ("checkpoint_minutes", "often"),
    ],
)
def test_bad_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        TrainConfig(**{name: value})  # type: ignore[arg-type]
