"""Reader of GGUF files, memory-mapped and lazy.

The `gguf` package's reader builds a Python object for every string of a vocabulary: 2 s for 49k tokens, 8 s for 150k,
at every start. Here an array is only located when a file is opened (its strings are hopped over, length by length) and
parsed when somebody asks for it, which opens the same files in a few hundredths of a second.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from outrider.models.quants import BLOCKS, TYPE_NAMES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_UNPACKERS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_MAX_DIMENSIONS = 4
_SMALLEST_FIELD = 13  # an empty key (8 bytes), a type (4) and one byte of value
_SMALLEST_TENSOR = 32  # an empty name (8), a number of dimensions (4), one dimension (8), a type (4), an offset (8)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. kind: "Q4_K", …; shape: row-major, rows first; start and stop: bytes in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class _Array:
    """An array that has been located, not parsed: element type, number of elements, bytes in the file."""

    kind: int
    count: int
    start: int
    stop: int


class GGUFFile:
    """An open GGUF file. Raises ModelFileError or UnsupportedModelError, naming the file and what is wrong with it.

    path: the file. fields: metadata by key; arrays are read with `strings` and `numbers`. tensors: by GGUF name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map(path)
        try:
            self._read_header()
        except (struct.error, OverflowError):
            raise self._broken("it ends in the middle of its header; the file is truncated or corrupt") from None
        except UnicodeDecodeError:
            raise self._broken("its header holds text that is not UTF-8") from None

    def _broken(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}")

    def _read_header(self) -> None:
        data = self._map
        if data[:4] != MAGIC:
            raise self._broken("not a GGUF file (it does not start with the letters GGUF)")
        version, tensor_count, field_count = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            swapped = " (a big-endian file)" if version >> 24 in (2, 3) and not version & 0xFFFF else ""
            raise UnsupportedModelError(f"{self.path}: GGUF version {version}{swapped}; supported are 2 and 3")
        room = len(data) - 24
        if field_count * _SMALLEST_FIELD + tensor_count * _SMALLEST_TENSOR > room:
            raise self._broken(
                f"its header promises {field_count} fields and {tensor_count} tensors, more than the file can hold; "
                "the file is truncated or corrupt"
            )
        self._at = 24
        self.fields: Mapping[str, Any] = self._read_fields(field_count)
        if self.integer("split.count", 1) > 1:
            raise UnsupportedModelError(
                f"{self.path}: one part of a GGUF split in {self.integer('split.count')}; join the parts first"
            )
        self.tensors: Mapping[str, TensorInfo] = self._read_tensors(tensor_count)

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._map, self._at)[0]
        self._at += 4
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self._map, self._at)[0]
        self._at += 8
        return value

    def _string(self) -> str:
        length = self._u64()
        start, self._at = self._at, self._at + length
        if self._at > len(self._map):
            raise struct.error
        return self._map[start : self._at].decode()

    def _read_fields(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in fields:
                raise self._broken(f"its header holds the field {key!r} twice; the file is corrupt")
            fields[key] = self._value(self._u32(), key)
        return fields

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._locate_array(key)
        return self._unpack(kind, key)

    def _unpack(self, kind: int, key: str) -> Any:
        unpacker = self._unpacker(kind, key)
        value = unpacker.unpack_from(self._map, self._at)[0]
        self._at += unpacker.size
        return value

    def _unpacker(self, kind: int, key: str) -> struct.Struct:
        if kind not in _UNPACKERS:
            raise self._broken(f"the field {key!r} has unknown type {kind}; the file is corrupt or too new")
        return _UNPACKERS[kind]

    def _locate_array(self, key: str) -> _Array:
        kind, count = self._u32(), self._u64()
        size = _U64.size if kind == _STRING else self._unpacker(kind, key).size
        start = at = self._at
        if count * size > len(self._map) - start:
            raise self._broken(f"the field {key!r} promises {count} values, more than the file can hold")
        if kind == _STRING:
            data, unpack = self._map, _U64.unpack_from
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
            if at > len(data):
                raise struct.error
        else:
            at += count * size
        self._at = at
        return _Array(kind, count, start, at)

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        entries: list[tuple[str, int, tuple[int, ...], int]] = []
        for _ in range(count):
            name, dimensions = self._string(), self._u32()
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self._broken(f"tensor {name!r} has {dimensions} dimensions; the file is corrupt")
            shape = tuple(self._u64() for _ in range(dimensions))[::-1]
            entries.append((name, self._u32(), shape, self._u64()))
        alignment = self.integer("general.alignment", 32)
        if alignment < 1:
            raise self._broken(f"its alignment is {alignment}")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise self._broken(f"it holds the tensor {name!r} twice; the file is corrupt")
            tensors[name] = self._place(name, kind, shape, data_start + offset)
        return tensors

    def _place(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> TensorInfo:
        kind_name = TYPE_NAMES.get(kind, f"number {kind}")
        if kind_name not in BLOCKS:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is of GGUF type {kind_name}; supported are {', '.join(BLOCKS)}"
            )
        block = BLOCKS[kind_name]
        if shape[-1] % block.elements:
            raise self._broken(f"tensor {name!r} has rows of {shape[-1]}, not a multiple of {kind_name}'s blocks")
        stop = start + math.prod(shape) // block.elements * block.bytes
        if stop > len(self._map):
            raise self._broken(
                f"the data of tensor {name!r} ends at byte {stop}, but the file has {len(self._map)}; it is truncated"
            )
        return TensorInfo(kind_name, shape, start, stop)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor: a read-only view of the file."""
        import numpy as np

        info = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, info.stop - info.start, info.start)

    def array_bytes(self, key: str) -> memoryview:
        """An array field as the file stores it, unparsed: for hashing. Raises ModelFileError if it is missing."""
        array = self._array(key)
        return memoryview(self._map)[array.start : array.stop]

    def strings(self, key: str) -> list[str]:
        """An array of strings. Text that is not UTF-8 keeps its bytes as surrogates."""
        array = self._array(key)
        if array.kind != _STRING:
            raise self._broken(f"the field {key!r} is not a list of strings")
        data, at, unpack = self._map, array.start, _U64.unpack_from
        values: list[str] = []
        for _ in range(array.count):
            stop = at + 8 + unpack(data, at)[0]
            values.append(data[at + 8 : stop].decode(errors="surrogateescape"))
            at = stop
        return values

    def numbers(self, key: str) -> list[Any]:
        """An array of numbers or booleans."""
        array = self._array(key)
        if array.kind == _STRING:
            raise self._broken(f"the field {key!r} is not a list of numbers")
        return list(struct.unpack_from(f"<{array.count}{_SCALARS[array.kind]}", self._map, array.start))

    def _array(self, key: str) -> _Array:
        value = self._require(key)
        if not isinstance(value, _Array):
            raise self._broken(f"the field {key!r} is not a list")
        return value

    def _require(self, key: str) -> Any:
        if key not in self.fields:
            raise self._broken(f"the field {key!r} is missing")
        return self.fields[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; ``default`` if the field is missing, ModelFileError if there is no default either."""
        value = self.fields.get(key, default) if default is not None else self._require(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._broken(f"the field {key!r} is not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, as `integer`."""
        value = self.fields.get(key, default) if default is not None else self._require(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._broken(f"the field {key!r} is not a number")
        return float(value)

    def string(self, key: str, default: str | None = None) -> str:
        """A string, as `integer`."""
        value = self.fields.get(key, default) if default is not None else self._require(key)
        if not isinstance(value, str):
            raise self._broken(f"the field {key!r} is not a string")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """A boolean, as `integer`."""
        value = self.fields.get(key, default)
        if not isinstance(value, bool):
            raise self._broken(f"the field {key!r} is not a boolean")
        return value


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelFileError(f"{path}: the file is empty") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from None
