"""Digests of model files: right, remembered for as long as the file stays what it is, and taken over from fetching."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.models import digests, fetch
from outrider.models.aliases import ALIASES

CONTENT = b"weights" * 1000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "digests"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gains an entry whenever a file is read through."""
    names: list[str] = []
    real = hashlib.file_digest

    def counted(file: object, name: str) -> object:
        names.append(name)
        return real(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(digests.hashlib, "file_digest", counted)
    return names


@pytest.fixture
def file(tmp_path: Path, folder: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return path


def test_a_file_is_read_once(file: Path, hashed: list[str]) -> None:
    expected = hashlib.sha256(CONTENT).hexdigest()
    assert [digests.file_digest(file) for _ in range(3)] == [expected] * 3
    assert hashed == ["sha256"]


def test_a_link_is_the_file_it_leads_to(file: Path, hashed: list[str]) -> None:
    link = file.with_name("link.gguf")
    link.symlink_to(file)
    assert digests.file_digest(link) == digests.file_digest(file)
    assert len(hashed) == 1


@pytest.mark.parametrize("what", ["size", "time", "inode"])
def test_a_change_is_noticed(what: str, file: Path, hashed: list[str]) -> None:
    digests.file_digest(file)
    before = file.stat()
    changed = CONTENT + b"!" if what == "size" else CONTENT[::-1]
    if what == "inode":
        other = file.with_name("other")
        other.write_bytes(changed)
        os.replace(other, file)
    else:
        file.write_bytes(changed)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + (what == "time")))
    assert digests.file_digest(file) == hashlib.sha256(changed).hexdigest()
    assert len(hashed) == 2


@pytest.mark.parametrize("note", [b"", b"[]", b"{}", b"\xff", b'{"sha256": 1}'])
def test_a_damaged_note_is_written_anew(note: bytes, file: Path, folder: Path, hashed: list[str]) -> None:
    digests.file_digest(file)
    (path,) = folder.iterdir()
    path.write_bytes(note)
    assert digests.file_digest(file) == digests.file_digest(file) == hashlib.sha256(CONTENT).hexdigest()
    assert len(hashed) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(digests, "write_atomically", refuse)
    assert digests.file_digest(file) == hashlib.sha256(CONTENT).hexdigest()


def test_what_was_checked_when_it_was_fetched_is_not_read_again(
    folder: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    alias = replace(ALIASES["smollm2-135m"], name="tiny", file="tiny.gguf", size=len(CONTENT), sha256=sha256)
    monkeypatch.setattr(digests, "ALIASES", {"tiny": alias})
    path = fetch.model_path(alias)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    fetch._mark_verified(alias)
    assert digests.file_digest(path) == sha256
    assert hashed == []
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(1, 1))
    assert digests.file_digest(path) == hashlib.sha256(CONTENT[::-1]).hexdigest()
    assert len(hashed) == 1
    assert json.loads(next(folder.iterdir()).read_text())["path"] == str(path.resolve())
