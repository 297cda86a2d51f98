"""Packed weights on disk: a model file is packed once, and read back in a second the next time.

A file belongs to one version of one source, told by the source's path, sizes and times of change. It holds a line of
JSON that describes it, padded to a page, and then the arena as it lies in memory. Anything that does not check out is
packed again and replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import _native
from outrider.executors.native.packing import PackedWeights, Place, pack_weights

if TYPE_CHECKING:
    from outrider.models.loader import Model

_VERSION = 1
_PAGE = 4096


def load_or_pack(
    model: Model, quantization: str | None, pool: _native.ThreadPool, *, use_cache: bool = True
) -> PackedWeights:
    """The model's packed weights, from the cache if they are there, else packed now (and put there)."""
    if model.source is None or not use_cache:
        return pack_weights(model.config, model.weights, quantization, pool)
    from outrider.models.cache import cache_dir, make_folder

    folder = make_folder(cache_dir() / "packed")
    identity = _identity(model.source, quantization)
    path = folder / f"{_digest(str(model.source.resolve()), str(quantization))}.packed"
    packed = _read(path, identity, pool)
    if packed is None:
        packed = pack_weights(model.config, model.weights, quantization, pool)
        _write(path, identity, packed, pool)
    return packed


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _identity(source: Path, quantization: str | None) -> dict[str, Any]:
    """What has to be equal for a packed file to be of use."""
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    return {
        "version": _VERSION,
        "packed": _native.PACKED_VERSION,
        "quantization": quantization,
        "files": [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }


def _read(path: Path, identity: dict[str, Any], pool: _native.ThreadPool) -> PackedWeights | None:
    """The packed weights in a file; None if there is none, or it is of something else, or damaged."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline(1 << 24))
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


def _write(path: Path, identity: dict[str, Any], packed: PackedWeights, pool: _native.ThreadPool) -> None:
    """Write whole or not at all. A cache that cannot be written is a warning, not an error."""
    data = packed.arena.data
    header = {
        "identity": identity,
        "bytes": len(data),
        "checksum": _native.checksum(data, pool),
        "places": [_entry(place) for place in packed.places],
    }
    start = -(-(len(json.dumps(header)) + 64) // _PAGE) * _PAGE  # 64 bytes: room for "start" itself
    line = json.dumps(header | {"start": start}).encode() + b"\n"
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        with open(partial, "wb") as file:
            file.write(line.ljust(start, b"\0"))
            file.write(data.data)
        os.replace(partial, path)
    except OSError as error:
        warnings.warn(f"the packed weights could not be kept in {path.parent}: {error.strerror}", stacklevel=2)
    finally:
        partial.unlink(missing_ok=True)
