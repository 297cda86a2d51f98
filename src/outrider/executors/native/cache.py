"""Packed weights on disk: a model file is packed once, and read back in a second the next time.

A file belongs to one content, told by the sha256 of the source: copies of a model, and models that only moved, share
it. It holds a line of JSON that describes it, padded to a page, and then the arena as it lies in memory, each with a
checksum. Anything that does not check out is packed again and replaced; what a changed source leaves behind is removed.
A cache that cannot be written is a warning, not an error.

Files appear whole or not at all, under names that follow from what is in them, so that processes may pack the same
model at the same time: the last one's file stays, and all of them are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import _native
from outrider.executors.native.packing import PackedWeights, Place, pack_weights
from outrider.models.config import weight_shapes
from outrider.models.digests import file_digest
from outrider.models.weights_safetensors import weight_files

if TYPE_CHECKING:
    from outrider.models.loader import Model

_VERSION = 2
_PAGE = 4096
_LONGEST_HEADER = 1 << 24
_ABANDONED = 3600.0
"""Seconds after which an unfinished file is taken for one whose process was killed."""


def load_or_pack(
    model: Model,
    quantization: str | None,
    pool: _native.ThreadPool,
    *,
    use_cache: bool = True,
    without: Collection[str] = (),
) -> PackedWeights:
    """The model's packed weights, from the cache if they are there, else packed now (and put there).

    without: names of matrices that are left out; then there is no cache.
    """
    if model.source is None or not use_cache or without:
        return pack_weights(model.config, model.weights, quantization, pool, without)
    from outrider.models.cache import cache_dir

    folder = cache_dir() / "packed"
    before = _states(model.source)
    identity = _identity(model, quantization)
    path = folder / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.packed"
    packed = _read(path, identity, pool)
    if packed is None:
        packed = pack_weights(model.config, model.weights, quantization, pool)
        if _states(model.source) == before:  # else what was packed need not be what the digest is of
            try:
                _write(path, identity, model.source, packed, pool)
                _sweep(path, identity, model.source)
            except OSError as error:
                reason = f"the packed weights could not be kept in {folder}: {error.strerror}"
                warnings.warn(reason, stacklevel=2)
    return packed


def _source_files(source: Path) -> list[Path]:
    return [source] if source.is_file() else [source / name for name in weight_files(source)]


def _states(source: Path) -> list[tuple[int, int, int]]:
    """By which a change of the source is noticed."""
    stats = [file.stat() for file in _source_files(source)]
    return [(stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats]


def _identity(model: Model, quantization: str | None) -> dict[str, Any]:
    """What has to be equal for a packed file to be of use: content, layout, and what was asked for."""
    assert model.source is not None
    matrices = {name: list(shape) for name, shape in weight_shapes(model.config).items() if len(shape) == 2}
    return {
        "version": _VERSION,
        "packed": _native.PACKED_VERSION,
        "quantization": quantization,
        "files": [
            [file.name if model.source.is_dir() else "", file_digest(file)] for file in _source_files(model.source)
        ],
        "matrices": hashlib.sha256(json.dumps(matrices).encode()).hexdigest(),
    }


def _read(path: Path, identity: dict[str, Any], pool: _native.ThreadPool) -> PackedWeights | None:
    """The packed weights in a file; None if there is none, or it is of something else, or damaged."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline(_LONGEST_HEADER))
            if header.pop("digest") != _digest(header):
                return None
            if header["identity"] != identity or path.stat().st_size != header["start"] + header["bytes"]:
                return None
            file.seek(header["start"])
            arena = _native.Arena(header["bytes"])
            if file.readinto(arena.data.data) != header["bytes"]:
                return None
        if _native.checksum(arena.data, pool) != header["checksum"]:
            return None
        return PackedWeights(arena, tuple(_place(entry) for entry in header["places"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header).encode()).hexdigest()


def _place(entry: dict[str, Any]) -> Place:
    layout = _native.PackedLayout(
        getattr(_native.WeightFormat, entry["format"]),
        getattr(_native.ScaleKind, entry["scales"]),
        entry["has_min"],
        entry["n"],
        entry["k"],
    )
    return Place(entry["name"], layout, entry["offset"], entry["error"])


def _entry(place: Place) -> dict[str, Any]:
    layout = place.layout
    return {
        "name": place.name,
        "offset": place.offset,
        "error": place.error,
        "format": layout.format.name,
        "scales": layout.scales.name,
        "has_min": layout.has_min,
        "n": layout.n,
        "k": layout.k,
    }


def _write(path: Path, identity: dict[str, Any], source: Path, packed: PackedWeights, pool: _native.ThreadPool) -> None:
    """Write whole or not at all. Raises OSError."""
    data = packed.arena.data
    header = {
        "identity": identity,
        "source": str(source.resolve()),
        "bytes": len(data),
        "checksum": _native.checksum(data, pool),
        "places": [_entry(place) for place in packed.places],
    }
    start = -(-(len(json.dumps(header)) + 192) // _PAGE) * _PAGE  # 192 bytes: room for "start" itself, and the digest
    header["start"] = start
    line = json.dumps(header | {"digest": _digest(header)}).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        with open(partial, "wb") as file:
            file.write(line.ljust(start, b"\0"))
            file.write(data.data)
        os.replace(partial, path)
    finally:
        with suppress(OSError):  # a file system that cannot be written says so even of a file that is not there
            partial.unlink()


def _sweep(path: Path, identity: dict[str, Any], source: Path) -> None:
    """Remove packed files that ``path`` takes the place of: of an earlier content of the same source, or in a form that
    this version does not read; and what killed processes left unfinished.
    """
    for other, header in _headers(path.parent):
        old = header.get("identity") or {}
        readable = all(old.get(key) == identity[key] for key in ("version", "packed"))
        same = header.get("source") == str(source.resolve()) and old.get("quantization") == identity["quantization"]
        if not readable or (same and old.get("files") != identity["files"]):
            other.unlink(missing_ok=True)
    for part in path.parent.glob("*.part"):
        try:
            if time.time() - part.stat().st_mtime > _ABANDONED:
                part.unlink()
        except FileNotFoundError:
            continue


def _headers(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The packed files of the cache with their headers; an empty one where it cannot be read."""
    for path in folder.glob("*.packed"):
        try:
            with open(path, "rb") as file:
                header = json.loads(file.readline(_LONGEST_HEADER))
        except (OSError, ValueError):
            header = {}
        yield path, header if isinstance(header, dict) else {}
