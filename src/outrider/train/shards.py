"""Tensors of many texts in a few big files, written one behind the other and read through a memory map.

A folder holds ``states-00000.bin``, ``states-00001.bin``, … and ``states.json``, which says how much of them is whole.
It is replaced in one step once the data is on the disk, so that a killed writer leaves a store to go on with.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.models.cache import write_atomically
from outrider.train.disk import check_room

SHARD_BYTES = 1 << 30
INDEX = "states.json"
_VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where a text's states lie: shard, and offset in it in elements."""

    shard: int
    offset: int


class Shards:
    """The states of the first `done` of some texts, bfloat16 [L, T, H] each.

    What an earlier run wrote counts as far as it was made for the same beginning of the texts; the rest is removed.
    """

    def __init__(
        self,
        folder: Path,
        texts: Sequence[Sequence[int]],
        width: int,
        identity: str,
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """width: elements per token, L * H. identity: what states depend on next to the texts, as one string."""
        self._folder = folder
        self._texts = texts
        self._width = width
        self._places = _places(texts, width, shard_bytes)
        self._maps: dict[int, torch.Tensor] = {}
        self._digest = hashlib.sha256(f"{_VERSION} {width} {shard_bytes} {identity}".encode())
        self.done = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def bytes_of(self, index: int) -> int:
        """Bytes that the states of one text take."""
        return 2 * self._width * len(self._texts[index])

    def append(self, states: Sequence[torch.Tensor]) -> None:
        """Write the states of the next texts. Raises DiskFullError, before anything is written, or OSError."""
        size = sum(self.bytes_of(self.done + i) for i in range(len(states)))
        check_room(self._folder, size)
        start = 0
        while start < len(states):
            shard = self._places[self.done + start].shard
            end = start
            while end < len(states) and self._places[self.done + end].shard == shard:
                end += 1
            self._write(shard, states[start:end])
            start = end
        for index in range(self.done, self.done + len(states)):
            self._count(index)
        self.done += len(states)
        self._note()

    def read(self, index: int) -> torch.Tensor:
        """The states of a text below `done`: a view of the file, [L * T * H]."""
        place = self._places[index]
        size = self._width * len(self._texts[index])
        return self._map(place.shard, place.offset + size)[place.offset : place.offset + size]

    def close(self) -> None:
        """Let go of the maps; the files stay."""
        self._maps.clear()

    def _map(self, shard: int, least: int) -> torch.Tensor:
        """The shard's elements, mapped anew if it has grown since."""
        if shard not in self._maps or len(self._maps[shard]) < least:
            path = self._path(shard)
            self._maps[shard] = torch.from_file(
                str(path), shared=False, size=path.stat().st_size // 2, dtype=torch.bfloat16
            )
        return self._maps[shard]

    def _path(self, shard: int) -> Path:
        return self._folder / f"states-{shard:05d}.bin"

    def _write(self, shard: int, states: Sequence[torch.Tensor]) -> None:
        with self._path(shard).open("ab") as file:
            for tensor in states:
                file.write(tensor.contiguous().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def _note(self) -> None:
        record = {"version": _VERSION, "texts": self.done, "digest": self._digest.hexdigest()}
        write_atomically(self._folder / INDEX, json.dumps(record).encode())

    def _count(self, index: int) -> None:
        self._digest.update(array("i", self._texts[index]).tobytes() + b";")

    def _resume(self) -> None:
        """Take over what the index vouches for, and cut the files back to it."""
        empty = self._digest.copy()
        record = self._read_index()
        texts = record.get("texts", 0)
        if isinstance(texts, int) and 0 < texts <= len(self._texts):
            for index in range(texts):
                self._count(index)
            self.done = texts if self._digest.hexdigest() == record.get("digest") else 0
        sizes = self._sizes()
        if any(not self._path(s).exists() or self._path(s).stat().st_size < size for s, size in sizes.items()):
            self.done = 0
        if self.done == 0:
            self._digest, sizes = empty, {}
        for path in self._folder.glob("states-*.bin"):
            shard = int(path.stem.removeprefix("states-"))
            if shard not in sizes:
                path.unlink()
            elif path.stat().st_size > sizes[shard]:
                os.truncate(path, sizes[shard])

    def _sizes(self) -> dict[int, int]:
        """Shard -> bytes that the texts below `done` fill."""
        sizes: dict[int, int] = {}
        for index in range(self.done):
            place = self._places[index]
            sizes[place.shard] = 2 * place.offset + self.bytes_of(index)
        return sizes

    def _read_index(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            record = json.loads((self._folder / INDEX).read_bytes())
            if isinstance(record, dict):
                return record
        return {}


def _places(texts: Sequence[Sequence[int]], width: int, shard_bytes: int) -> list[Place]:
    places = []
    shard, offset = 0, 0
    for text in texts:
        size = width * len(text)
        if offset and 2 * (offset + size) > shard_bytes:
            shard, offset = shard + 1, 0
        places.append(Place(shard, offset))
        offset += size
    return places
