"""Packed weights on disk: taken when they fit, rebuilt when anything is wrong with them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.models.loader import Model, load_model
from tests.support.models import random_model, write_gguf, write_hf_folder
from tests.support.native import available_isas

if not available_isas():
    pytest.skip("the native extension is not built", allow_module_level=True)

from outrider import _native
from outrider.executors.native import cache
from outrider.executors.native.packing import PackedWeights

POOL = _native.ThreadPool(2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def model(tmp_path: Path, folder: Path) -> Model:
    return load_model(str(write_gguf(random_model("llama", num_layers=2), tmp_path / "model.gguf", "Q8_0")))


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gains an entry whenever weights are packed."""
    calls: list[str] = []
    real = cache.pack_weights

    def counted(*args: object) -> PackedWeights:
        calls.append("packed")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "pack_weights", counted)
    return calls


def load(model: Model, quantization: str | None = None) -> PackedWeights:
    return cache.load_or_pack(model, quantization, POOL)


def assert_equal(a: PackedWeights, b: PackedWeights) -> None:
    assert [(p.name, p.offset, p.layout.format, p.error) for p in a.places] == [
        (p.name, p.offset, p.layout.format, p.error) for p in b.places
    ]
    assert np.array_equal(a.arena.data, b.arena.data)


def test_packed_once(model: Model, folder: Path, packings: list[str]) -> None:
    assert_equal(load(model), load(model))
    assert packings == ["packed"]
    assert len(list(folder.iterdir())) == 1


def test_each_quantization_has_a_file(tmp_path: Path, folder: Path, packings: list[str]) -> None:
    model = load_model(str(write_hf_folder(random_model("llama", num_layers=2), tmp_path / "hf")))
    for quantization in (None, "int8", "int4"):
        assert_equal(load(model, quantization), load(model, quantization))
    assert len(packings) == len(list(folder.iterdir())) == 3


def test_a_changed_source_is_packed_again_and_replaces_what_was_there(
    model: Model, folder: Path, packings: list[str]
) -> None:
    first = load(model)
    assert model.source is not None
    write_gguf(random_model("llama", num_layers=2, seed=1), model.source, "Q8_0")
    changed = load_model(str(model.source))
    assert not np.array_equal(load(changed).arena.data, first.arena.data)
    load(changed)
    assert len(packings) == 2
    assert len(list(folder.iterdir())) == 1


def test_the_content_counts_and_not_where_it_lies(
    model: Model, tmp_path: Path, folder: Path, packings: list[str]
) -> None:
    load(model)
    assert model.source is not None
    os.utime(model.source, ns=(1, 1))
    load(model)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.source.read_bytes())
    assert_equal(load(load_model(str(copy))), load(model))
    assert packings == ["packed"]
    assert len(list(folder.iterdir())) == 1


def test_weights_under_another_configuration_are_another_content(
    tmp_path: Path, folder: Path, packings: list[str]
) -> None:
    source = write_hf_folder(random_model("llama", num_layers=2), tmp_path / "hf")
    load(load_model(str(source)))
    shallower = load_model(str(source))
    config = replace(shallower.config, num_layers=1)
    assert len(load(replace(shallower, config=config)).places) < len(load(shallower).places)
    assert len(packings) == 2


def test_a_source_that_changes_meanwhile_is_not_kept(
    model: Model, folder: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = cache.pack_weights

    def changes(*args: object) -> PackedWeights:
        assert model.source is not None
        os.utime(model.source, ns=(len(packings), 1))
        return counted(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "pack_weights", changes)
    os.utime(model.source or "", ns=(7, 7))
    load(model)
    assert not folder.exists()


def test_what_killed_processes_and_other_versions_left_is_removed(model: Model, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, age in (("old.1.part", 7200), ("new.2.part", 5)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age,) * 2)
    (folder / "other.packed").write_bytes(b'{"identity": {"version": 1}}\n')
    (folder / "broken.packed").write_bytes(b"\0\1")
    load(model)
    left = {path.name for path in folder.iterdir()}
    assert len(left) == 2
    assert "new.2.part" in left


def test_processes_that_pack_the_same_model_do_not_get_in_each_others_way(model: Model, folder: Path) -> None:
    program = (
        "import sys, zlib; from outrider import _native\n"
        "from outrider.executors.native import cache; from outrider.models.loader import load_model\n"
        "packed = cache.load_or_pack(load_model(sys.argv[1]), None, _native.ThreadPool(1))\n"
        "print(zlib.crc32(packed.arena.data))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(model.source)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {process.communicate(timeout=120)[0].strip() for process in started}
    assert all(process.returncode == 0 for process in started)
    assert said == {str(zlib.crc32(load(model).arena.data))}
    assert len(list(folder.iterdir())) == 1


def flip(data: bytearray) -> None:
    data[-5000] ^= 1


def flip_header(data: bytearray) -> None:
    data[data.index(b"places") + 1] ^= 1


def flip_name(data: bytearray) -> None:
    """Still JSON, and all that is asked of it but for a name; other bits are places, shapes and formats."""
    data[data.index(b"gate_proj")] ^= 1


def truncate(data: bytearray) -> None:
    del data[-4096:]


def empty(data: bytearray) -> None:
    data.clear()


@pytest.mark.parametrize("damage", [flip, flip_header, flip_name, truncate, empty])
def test_a_damaged_file_is_replaced(
    model: Model, folder: Path, packings: list[str], damage: Callable[[bytearray], None]
) -> None:
    first = load(model)
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    assert_equal(load(model), first)
    assert_equal(load(model), first)
    assert len(packings) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(
    model: Model, folder: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", refuse)
    with pytest.warns(UserWarning, match="No space left"):
        load(model)
    assert list(folder.iterdir()) == []


def test_a_cache_on_a_read_only_file_system_is_a_warning(
    model: Model, folder: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    folder.mkdir(parents=True)
    (folder / "broken.packed").write_bytes(b"\0\1")
    for method in ("mkdir", "unlink"):
        monkeypatch.setattr(Path, method, refuse)
    with pytest.warns(UserWarning, match="Read-only"):
        load(model)
    assert packings == ["packed"]


def test_a_cache_folder_that_cannot_be_made_is_a_warning(
    model: Model, tmp_path: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be kept"):
        load(model)
    assert packings == ["packed"]


def test_models_in_memory_and_those_told_not_to_are_not_kept(model: Model, folder: Path) -> None:
    load(random_model("llama", num_layers=2))
    cache.load_or_pack(model, None, POOL, use_cache=False)
    assert not folder.exists()
