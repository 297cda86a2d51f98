"""The GGUF reader: what it reads, how lazily, and that every broken file gives one clear line."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.core.errors import ModelFileError, ModelNotFoundError, OutriderError, UnsupportedModelError
from outrider.models.gguf import GGUFFile

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def strings(key: str, values: list[Any]) -> bytes:
    return field(key, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values)))


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


FIELDS = [
    field("general.architecture", STRING, text("llama")),
    field("a.count", U32, struct.pack("<I", 7)),
    field("a.negative", I32, struct.pack("<i", -7)),
    field("a.number", F32, struct.pack("<f", 0.5)),
    field("a.flag", BOOL, b"\1"),
    strings("tokens", ["one", "", "zwei ü"]),
    field("scores", ARRAY, struct.pack("<IQ3f", F32, 3, 1.0, -2.0, 0.25)),
]


def gguf_bytes(
    fields: list[bytes] = FIELDS,
    tensors: list[bytes] | None = None,
    data: bytes = bytes(range(48)),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    tensors = [tensor("w", (4, 3))] if tensors is None else tensors
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(fields))))
    head += b"".join(fields) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def opened(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_fields_and_tensors(tmp_path: Path) -> None:
    file = opened(tmp_path, gguf_bytes())
    assert file.string("general.architecture") == "llama"
    assert file.integer("a.count") == 7
    assert file.integer("a.negative") == -7
    assert file.number("a.number") == 0.5
    assert file.number("a.count") == 7.0
    assert file.boolean("a.flag", False) is True
    assert file.strings("tokens") == ["one", "", "zwei ü"]
    assert file.numbers("scores") == [1.0, -2.0, 0.25]
    assert file.tensors["w"].shape == (3, 4)
    assert file.data("w").tolist() == list(range(48))


def test_version_2_is_read(tmp_path: Path) -> None:
    assert opened(tmp_path, gguf_bytes(version=2)).integer("a.count") == 7


def test_defaults_are_for_missing_fields_only(tmp_path: Path) -> None:
    file = opened(tmp_path, gguf_bytes())
    assert file.integer("no.such", 3) == 3
    assert file.string("no.such", "x") == "x"
    assert file.boolean("no.such", True) is True
    assert file.number("no.such", 1.5) == 1.5
    for read in (file.integer, file.number, file.string):
        with pytest.raises(ModelFileError, match=r"no\.such.*missing"):
            read("no.such")


def test_a_field_of_another_type_is_an_error(tmp_path: Path) -> None:
    file = opened(tmp_path, gguf_bytes())
    wrong = [
        lambda: file.integer("a.flag"),
        lambda: file.integer("a.number", 1),
        lambda: file.number("general.architecture"),
        lambda: file.string("a.count"),
        lambda: file.boolean("a.count", True),
        lambda: file.strings("scores"),
        lambda: file.numbers("tokens"),
        lambda: file.strings("a.count"),
        lambda: file.integer("tokens"),
    ]
    for read in wrong:
        with pytest.raises(ModelFileError, match="is not a"):
            read()


def test_opening_does_not_parse_arrays(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 would fail if they were parsed at open; they come back unharmed when asked for."""
    file = opened(tmp_path, gguf_bytes([*FIELDS, strings("broken", [b"\xff\xfe", "ok"])]))
    first, second = file.strings("broken")
    assert first.encode(errors="surrogateescape") == b"\xff\xfe"
    assert second == "ok"


def test_alignment_is_honoured(tmp_path: Path) -> None:
    fields = [*FIELDS, field("general.alignment", U32, struct.pack("<I", 256))]
    file = opened(tmp_path, gguf_bytes(fields, alignment=256))
    assert file.tensors["w"].start % 256 == 0
    assert file.data("w").tolist() == list(range(48))


def test_quantised_rows(tmp_path: Path) -> None:
    file = opened(tmp_path, gguf_bytes(tensors=[tensor("q", (64, 2), 8)], data=bytes(2 * 68)))
    assert file.tensors["q"].kind == "Q8_0"
    assert file.tensors["q"].stop - file.tensors["q"].start == 2 * 68


UNKNOWN_KIND = field("odd", 77, b"")
NESTED = field("nest", ARRAY, struct.pack("<IQ", ARRAY, 1))

BROKEN: dict[str, tuple[bytes, type[OutriderError], str]] = {
    "empty": (b"", ModelFileError, "empty"),
    "magic": (b"GGML" + gguf_bytes()[4:], ModelFileError, "not a GGUF file"),
    "old version": (gguf_bytes(version=1), UnsupportedModelError, "version 1"),
    "new version": (gguf_bytes(version=4), UnsupportedModelError, "version 4"),
    "big-endian": (gguf_bytes(version=3 << 24), UnsupportedModelError, "big-endian"),
    "absurd fields": (gguf_bytes(counts=(1, 1 << 60)), ModelFileError, "promises"),
    "absurd tensors": (gguf_bytes(counts=(1 << 60, 7)), ModelFileError, "promises"),
    "absurd array": (
        gguf_bytes([field("x", ARRAY, struct.pack("<IQ", U32, 1 << 62))]),
        ModelFileError,
        "promises 4611686018427387904 values",
    ),
    "absurd string": (gguf_bytes([field("x", STRING, struct.pack("<Q", 1 << 63))]), ModelFileError, "truncated"),
    "absurd string in array": (
        gguf_bytes([field("x", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 62))]),
        ModelFileError,
        "truncated",
    ),
    "field twice": (gguf_bytes([FIELDS[1], FIELDS[1]]), ModelFileError, "'a.count' twice"),
    "unknown field type": (gguf_bytes([UNKNOWN_KIND]), ModelFileError, "unknown type 77"),
    "nested array": (gguf_bytes([NESTED]), ModelFileError, "unknown type 9"),
    "key not UTF-8": (gguf_bytes([text(b"\xff") + struct.pack("<I", BOOL) + b"\0"]), ModelFileError, "UTF-8"),
    "tensor twice": (gguf_bytes(tensors=[tensor("w", (4,)), tensor("w", (4,))]), ModelFileError, "'w' twice"),
    "dimensions": (gguf_bytes(tensors=[tensor("w", (1,) * 5)]), ModelFileError, "5 dimensions"),
    "no dimension": (gguf_bytes(tensors=[tensor("w", ())]), ModelFileError, "0 dimensions"),
    "past the end": (gguf_bytes(tensors=[tensor("w", (4, 4))]), ModelFileError, "'w' ends at byte .* truncated"),
    "offset past the end": (gguf_bytes(tensors=[tensor("w", (4,), 0, 1 << 40)]), ModelFileError, "truncated"),
    "overflowing shape": (gguf_bytes(tensors=[tensor("w", (1 << 40, 1 << 40))]), ModelFileError, "truncated"),
    "half a block": (gguf_bytes(tensors=[tensor("w", (48,), 8)]), ModelFileError, "rows of 48"),
    "known, not supported type": (gguf_bytes(tensors=[tensor("w", (256,), 17)]), UnsupportedModelError, "IQ2_XS"),
    "unknown type": (gguf_bytes(tensors=[tensor("w", (256,), 99)]), UnsupportedModelError, "number 99"),
    "alignment": (gguf_bytes([field("general.alignment", U32, bytes(4))]), ModelFileError, "alignment is 0"),
    "split": (gguf_bytes([field("split.count", U32, struct.pack("<I", 3))]), UnsupportedModelError, "split in 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_say_what_is_wrong(tmp_path: Path, name: str) -> None:
    content, kind, message = BROKEN[name]
    with pytest.raises(kind, match=message) as caught:
        opened(tmp_path, content)
    assert str(tmp_path / "m.gguf") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="No such file"):
        GGUFFile(tmp_path / "no.gguf")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = gguf_bytes()
    opened(tmp_path, whole)
    for length in range(len(whole)):
        with pytest.raises(ModelFileError):
            opened(tmp_path, whole[:length])


@settings(max_examples=300, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(gguf_bytes()) - 49), value=st.integers(0, 255))
def test_a_flipped_byte_never_escapes_as_another_error(tmp_path: Path, at: int, value: int) -> None:
    content = bytearray(gguf_bytes())
    content[at] = value
    try:
        file = opened(tmp_path, bytes(content))
        file.strings("tokens")
        file.numbers("scores")
    except OutriderError:
        pass


def test_data_is_a_view_of_the_file(tmp_path: Path) -> None:
    data = opened(tmp_path, gguf_bytes()).data("w")
    assert not data.flags.writeable
    assert data.dtype == np.uint8
