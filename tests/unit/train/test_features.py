"""The feature store: the executor's own numbers, whatever is cached, within its budget, and after a kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.core.errors import ConfigError, UsageError
from outrider.executors import EXECUTORS as EXECUTORS_BY_NAME
from outrider.executors.base import Executor, Segment
from outrider.executors.native import why_unavailable
from outrider.train import disk
from outrider.train.data import Sample
from outrider.train.disk import DiskFullError
from outrider.train.features import FeatureStore
from outrider.train.shards import INDEX, Shards
from tests.support.models import random_model

LAYERS = (0, 2, 3)
WIDTH = 2 * 64 * len(LAYERS)
"""Bytes of one token's states."""


def some_samples(count: int = 12, seed: int = 0) -> list[Sample]:
    generator = random.Random(seed)
    lengths = [generator.randint(8, 40) for _ in range(count)]
    return [Sample(array("i", [generator.randrange(128) for _ in range(n)]), [(2, 5), (6, n)]) for n in lengths]


NATIVE = pytest.param("native", marks=pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())))
EXECUTORS = pytest.mark.parametrize("name", ["torch", NATIVE])


def executor(name: str = "torch") -> Executor:
    dtype = "float32" if name == "torch" else "auto"
    return EXECUTORS_BY_NAME.get(name)(
        random_model(), dtype=dtype, device="cpu", kv_tokens=512, kv_memory=None, max_context=256,
        quantization=None, threads=1,
    )  # fmt: skip


def open_store(
    folder: Path, samples: list[Sample], budget: int = 1 << 30, target: str = "t", name: str = "torch"
) -> FeatureStore:
    return FeatureStore(samples, LAYERS, executor(name), folder, disk_budget=budget, target=target)


def total(samples: list[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def same(store: FeatureStore, other: FeatureStore) -> bool:
    pairs = ((store.read(i), other.read(i)) for i in range(len(store)))
    return all(torch.equal(a.hidden[layer], b.hidden[layer]) for a, b in pairs for layer in LAYERS)


@EXECUTORS
def test_states_are_the_executors_own(name: str, tmp_path: Path) -> None:
    samples = some_samples()
    store = open_store(tmp_path, samples, name=name)
    store.fill()
    assert store.cached == len(store) == 12
    run = executor(name)
    for index, sample in enumerate(samples):
        seq = run.open()
        hidden = run.forward([Segment.chain(seq, sample.tokens)], LAYERS).hidden
        run.close(seq)
        found = store.read(index)
        assert found.tokens.tolist() == list(sample.tokens)
        assert found.tokens.dtype == torch.int64
        for layer in LAYERS:
            assert found.hidden[layer].dtype == torch.bfloat16
            torch.testing.assert_close(found.hidden[layer].float(), hidden[layer], rtol=1e-2, atol=1e-3)
        expected = [2 <= place < 5 or place >= 6 for place in range(len(sample.tokens))]
        assert found.mask.tolist() == expected


@EXECUTORS
def test_the_budget_is_kept_and_the_rest_is_computed_on_demand(name: str, tmp_path: Path) -> None:
    samples = some_samples()
    budget = WIDTH * sum(len(sample.tokens) for sample in samples[:5]) + WIDTH
    store = open_store(tmp_path / "part", samples, budget, name=name)
    done: list[int] = []
    store.fill(done.append)
    assert (store.cached, store.cacheable) == (5, 5)
    assert sum(done) == total(samples[:5])
    assert sum(path.stat().st_size for path in (tmp_path / "part").glob("*.bin")) <= budget
    whole = open_store(tmp_path / "whole", samples, name=name)
    whole.fill()
    assert same(store, whole)
    none = open_store(tmp_path / "none", samples, 0, name=name)
    none.fill()
    assert none.cached == 0
    assert same(none, whole)


def test_many_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    samples = some_samples()
    store = open_store(tmp_path, samples, WIDTH * total(samples[:6]))
    store.fill()
    order = [11, 0, 7, 3, 7, 1]
    found = list(store.read_many(order))
    assert [item.tokens.tolist() for item in found] == [list(samples[index].tokens) for index in order]
    for index, item in zip(order, found, strict=True):
        assert torch.equal(item.hidden[2], store.read(index).hidden[2])


def test_shards_are_cut_between_samples(tmp_path: Path) -> None:
    texts = [sample.tokens for sample in some_samples()]
    tensors = [torch.randn(2, len(text), 4).bfloat16() for text in texts]
    shards = Shards(tmp_path, texts, 8, "x", shard_bytes=1000)
    shards.append(tensors[:7])
    shards.append(tensors[7:])
    assert len(list(tmp_path.glob("*.bin"))) > 3
    assert all(path.stat().st_size <= 1000 for path in tmp_path.glob("*.bin"))
    again = Shards(tmp_path, texts, 8, "x", shard_bytes=1000)
    assert again.done == 12
    for shard in (shards, again):
        assert all(torch.equal(shard.read(i), tensors[i].flatten()) for i in range(12))


def test_an_unfinished_store_is_gone_on_with(tmp_path: Path) -> None:
    samples = some_samples()
    open_store(tmp_path, samples, WIDTH * total(samples[:4])).fill()
    with (tmp_path / "states-00000.bin").open("ab") as file:
        file.write(b"half a sample")
    store = open_store(tmp_path, samples)
    assert store.cached == 4
    store.fill()
    fresh = open_store(tmp_path / "fresh", samples)
    fresh.fill()
    assert same(store, fresh)
    assert (tmp_path / "states-00000.bin").read_bytes() == (tmp_path / "fresh" / "states-00000.bin").read_bytes()


def test_more_samples_keep_what_is_there(tmp_path: Path) -> None:
    samples = some_samples()
    open_store(tmp_path, samples[:5]).fill()
    assert open_store(tmp_path, samples).cached == 5


@pytest.mark.parametrize("change", ["samples", "target", "index", "data"])
def test_states_of_something_else_are_not_used(tmp_path: Path, change: str) -> None:
    samples = some_samples()
    open_store(tmp_path, samples).fill()
    if change == "index":
        (tmp_path / INDEX).write_text('{"texts": 12, "digest": 3}')
    if change == "data":
        os.truncate(tmp_path / "states-00000.bin", 1000)
    other = some_samples(seed=1) if change == "samples" else samples
    store = open_store(tmp_path, other, target="u" if change == "target" else "t")
    assert store.cached == 0
    assert list(tmp_path.glob("*.bin")) == []


KILLED = """
import sys
from pathlib import Path
from tests.unit.train.test_features import open_store, some_samples
open_store(Path(sys.argv[1]), some_samples(200), name=sys.argv[2]).fill(lambda tokens: print("step", flush=True))
"""


@EXECUTORS
def test_a_killed_fill_is_gone_on_with(name: str, tmp_path: Path) -> None:
    samples = some_samples(200)
    command = [sys.executable, "-c", KILLED, str(tmp_path), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGKILL)
    store = open_store(tmp_path, samples, name=name)
    assert 0 < store.cached < 200
    store.fill()
    fresh = open_store(tmp_path / "fresh", samples, name=name)
    fresh.fill()
    assert same(store, fresh)


def test_a_nearly_full_disk_stops_it_with_everything_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = some_samples(200)
    room = iter([disk.KEPT_FREE + (1 << 20), disk.KEPT_FREE + (1 << 20), disk.KEPT_FREE + 100])
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=next(room)))
    store = open_store(tmp_path, samples)
    with pytest.raises(DiskFullError, match=r"nearly full: 1\.1 GB free.*run the same command again"):
        store.fill()
    assert 0 < store.cached < 200
    monkeypatch.undo()
    again = open_store(tmp_path, samples)
    assert again.cached == store.cached
    again.fill()
    assert again.cached == 200


def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers \[4\] were asked for; there are 0 to 3"):
        FeatureStore(some_samples(), [4], executor(), tmp_path, disk_budget=0, target="t")
    long = [Sample(array("i", [1] * 257), [(1, 257)])]
    with pytest.raises(UsageError, match="a sample of 257 tokens is longer than the context of 256"):
        open_store(tmp_path, long)
