"""The training loop: drafters learn, runs resume as if nothing had been, and what cannot work is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from outrider.core.errors import ConfigError, UsageError
from outrider.heads.load import load_head
from outrider.train import checkpoint, disk, loop
from outrider.train.batches import collate
from outrider.train.config import TrainConfig
from outrider.train.identity import Origin
from outrider.train.modules import MODULES
from outrider.train.modules.medusa import Medusa, MedusaHead
from outrider.train.order import split
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
    assert bool(head.accept_by_rank) == (method == "medusa")
    assert_same_head(replace(head, accept_by_depth=(), accept_by_rank=()), module.to_head())
    written = json.loads((tmp_path / "curves.json").read_text())
    assert written["held_out"] == curves.held_out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_medusas_accuracies_by_rank_are_those_of_the_held_out_samples(tmp_path: Path) -> None:
    """Counted anew, from the formula of a head, with a sort in place of what the module does."""
    store = MemoryStore(small_target(), 60)
    module = small_module("medusa", store)
    assert isinstance(module, Medusa)
    config = replace(CONFIG, held_out=0.3)
    curves = train(store, module, config, tmp_path)
    head = load_head(tmp_path, store.model.config, "target")
    _, held_out = split(store.samples, config.held_out)
    hits, asked = torch.zeros(3, 8), torch.zeros(3, 1)
    for features in store.read_many(held_out):
        batch = collate([features], module.feature_layers, module.last_layer)
        right = module.wanted(batch).likeliest
        for k, part in enumerate(module.heads):
            assert isinstance(part, MedusaHead)
            logits = part(module.target.normed(batch.features), torch.float32) @ module.output().T
            best = logits.argsort(descending=True, stable=True)
            for row in range(len(batch) - k):
                asked[k] += bool(batch.learned[row + k])
                if batch.learned[row + k] and module.places[batch.labels[row + k]] >= 0:
                    hits[k] += best[row, :8] == right[row + k]
    assert asked.min() > 100
    assert torch.tensor(head.accept_by_rank) == pytest.approx((hits / asked).numpy(), abs=1e-6)
    assert [ranks[0] for ranks in head.accept_by_rank] == list(head.accept_by_depth)
    assert 0 < sum(head.accept_by_rank[0][1:]) < 1 - head.accept_by_depth[0]
    assert train(store, module, config, tmp_path) == curves
    assert load_head(tmp_path, store.model.config, "target").accept_by_rank == head.accept_by_rank


def test_bfloat16_learns_about_the_same(store: MemoryStore, tmp_path: Path) -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        module = small_module("eagle3", store, dtype)
        curves = train(store, module, CONFIG, tmp_path / str(dtype))
        losses.append(curves.held_out[-1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


# -- ending and going on ---------------------------------------------------------------------------------------------


Run = Callable[..., int]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Trains a drafter in a process of its own; the folder, the method, and where it is ended."""
    command = [sys.executable, "-m", "tests.support.training_runs"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runs:
        assert runs.stdin is not None
        assert runs.stdout is not None
        stdin, stdout = runs.stdin, runs.stdout

        def one(folder: Path, method: str, *end: object) -> int:
            print(json.dumps([method, str(folder), *end]), file=stdin, flush=True)
            return int(stdout.readline())

        yield one


def results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.json", "curves.json")}


@pytest.fixture(scope="module")
def unbroken(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    @cache
    def unbroken(method: str) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp(method)
        assert run(folder, method) == 0
        return results(folder)

    return unbroken


def kept(folder: Path) -> int:
    """The update that the checkpoint was made after; 0: there is none."""
    state = checkpoint.read(folder)
    return 0 if state is None else state["update"]


@pytest.mark.parametrize(
    ("method", "ends"),
    [
        ("eagle3", [("look", 5, "SIGKILL", 0)]),
        ("eagle3", [("update", 1, "SIGKILL", 0)]),
        ("eagle3", [("update", 7, "SIGKILL", 5), ("update", 6, "SIGKILL", 10)]),
        ("eagle3", [("checkpoint", 2, "SIGKILL", 5)]),
        ("eagle3", [("update", 6, "SIGTERM", 6)]),
        ("eagle3", [("drafter", 1, "SIGKILL", 15)]),
        ("eagle", [("update", 7, "SIGKILL", 5)]),
        ("medusa", [("update", 7, "SIGKILL", 5)]),
        ("mtp", [("update", 7, "SIGKILL", 5)]),
    ],
    ids=["looking", "at-first", "twice", "while-writing", "terminated", "at-last", "eagle", "medusa", "mtp"],
)
def test_a_run_that_is_ended_goes_on_to_the_same_drafter(
    method: str,
    ends: Sequence[tuple[str, int, str, int]],
    run: Run,
    unbroken: Callable[[str], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    """Bit for bit; what was learned since the last checkpoint is learned again."""
    for where, count, name, update in ends:
        assert run(tmp_path, method, where, count, name) == (1 if name == "SIGTERM" else -signal.Signals[name])
        assert kept(tmp_path) == update
        assert (tmp_path / "model.safetensors").exists() == (where == "drafter")
    assert run(tmp_path, method) == 0
    assert results(tmp_path) == unbroken(method)


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
