"""Dequantisation of GGUF tensors, to the very float32 values that ggml's own reference code gives.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block is a run of elements of one row with
its scales. Every value is computed in float32 in the order of the reference (scale by sub-scale first, then by the
quant, then the offset), so that the results are equal bit for bit; only then is it rounded to the dtype asked for.

Speed comes from three habits. Work goes in chunks that stay in the cache and are too small for PyTorch to share out:
an OpenMP barrier after every small operation makes loading thirty times slower as soon as another process wants the
same cores. Chunks are spread over threads of our own instead. And bytes move as whole runs (NumPy's void types), never
in loops of 16 or 32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Unpacked: TypeAlias = tuple[npt.NDArray[Any], Floats, Floats | None]

TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Type numbers in GGUF files, those we cannot read included so that an error can name them."""

_CHUNK = 1 << 15
"""Elements decoded at a time: the most that PyTorch still works through on the calling thread."""

_CHUNKS_PER_TASK = 16
"""A task unpacks its blocks in one go (half a million bytes), which leaves little to the cost of calling NumPy."""


@dataclass(frozen=True)
class Block:
    """elements and bytes of one block; unpack: blocks [n, bytes] -> integers [n, elements], scales and offsets.

    Scales and offsets are [n, groups]: element value = scale * integer + offset of its group. Types without blocks
    (F32, …) have no ``unpack``.
    """

    elements: int
    bytes: int
    unpack: Callable[[Bytes], Unpacked] | None = None


def dequantize(kind: str, data: Bytes, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values of a tensor stored as ``kind`` (a key of BLOCKS) in ``data``, in ``dtype`` (None: float32)."""
    import torch

    block = BLOCKS[kind]
    dtype = dtype or torch.float32
    if block.unpack is None:
        stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return torch.from_numpy(data.reshape(-1).copy()).view(stored).to(dtype).view(shape)
    blocks = data.reshape(-1, block.bytes)
    with torch.inference_mode(False):
        # The mode belongs to a thread: those below could not write to a tensor made inside a caller's inference mode.
        out = torch.empty(math.prod(shape), dtype=dtype)
        rows = out.view(-1, block.elements)
    step = _CHUNK // block.elements * _CHUNKS_PER_TASK
    starts = range(0, len(blocks), step)

    def decode(start: int) -> None:
        with np.errstate(invalid="ignore"):  # damaged scales (inf, NaN) show in the values, as in the reference
            _decode(block, blocks[start : start + step], rows[start : start + step])

    if len(starts) > 1:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
            list(pool.map(decode, starts))
    else:
        decode(0)
    return out.view(shape)


def _decode(block: Block, blocks: Bytes, rows: torch.Tensor) -> None:
    """Values of ``blocks`` [n, bytes] into ``rows`` [n, elements], by way of float32."""
    import torch

    assert block.unpack is not None
    unpacked = block.unpack(blocks)
    integers, scales = torch.from_numpy(unpacked[0]), torch.from_numpy(unpacked[1]).unsqueeze(-1)
    offsets = None if unpacked[2] is None else torch.from_numpy(unpacked[2]).unsqueeze(-1)
    step = _CHUNK // block.elements
    scratch = torch.empty(step, block.elements)
    for at in range(0, len(rows), step):
        part = slice(at, at + step)
        target = rows[part]
        values = target if target.dtype == torch.float32 else scratch[: len(target)]
        values.copy_(integers[part])
        groups = values.view(len(target), scales.shape[1], -1)
        groups.mul_(scales[part])
        if offsets is not None:
            groups.add_(offsets[part])
        if values is not target:
            target.copy_(values)


def _runs(raw: Bytes, size: int) -> npt.NDArray[np.void]:
    """The bytes of contiguous rows as runs of ``size``: [n, k * size] -> [n, k], each moved as one item."""
    return raw.view(f"V{size}")


def _cut(raw: Bytes, start: int, size: int) -> Bytes:
    """A contiguous copy of columns ``start`` … ``start + size`` of whole blocks."""
    return np.ascontiguousarray(raw.view(_field(start, size, raw.shape[1]))["it"]).view(np.uint8)


@cache
def _field(start: int, size: int, block: int) -> np.dtype[Any]:
    return np.dtype({"names": ["it"], "formats": [f"V{size}"], "offsets": [start], "itemsize": block})


def _half(raw: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of every block, widened: [n, 1]."""
    return _cut(raw, start, 2).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Each run of bytes becomes its low nibbles, then its high nibbles: [n, k] -> [n, 2k]."""
    out = np.empty((len(packed), 2 * packed.shape[1]), np.uint8)
    pairs = _runs(out, run)
    pairs[:, 0::2] = _runs(packed & np.uint8(15), run)
    pairs[:, 1::2] = _runs(packed >> np.uint8(4), run)
    return out


def _q8_0(raw: Bytes) -> Unpacked:
    return _cut(raw, 2, 32).view(np.int8), _half(raw, 0), None


def _q4_0(raw: Bytes) -> Unpacked:
    return (_nibbles(_cut(raw, 2, 16), 16) - np.uint8(8)).view(np.int8), _half(raw, 0), None


def _q4_1(raw: Bytes) -> Unpacked:
    return _nibbles(_cut(raw, 4, 16), 16), _half(raw, 0), _half(raw, 2)


def _fifth_bits(raw: Bytes, start: int) -> Bytes:
    """The four bytes at ``start`` as 16 or 0 for each of 32 elements, lowest bit first: [n, 32]."""
    return np.unpackbits(_cut(raw, start, 4), axis=1, bitorder="little") << np.uint8(4)


def _q5_0(raw: Bytes) -> Unpacked:
    numbers = _nibbles(_cut(raw, 6, 16), 16) | _fifth_bits(raw, 2)
    return (numbers - np.uint8(16)).view(np.int8), _half(raw, 0), None


def _q5_1(raw: Bytes) -> Unpacked:
    return _nibbles(_cut(raw, 8, 16), 16) | _fifth_bits(raw, 4), _half(raw, 0), _half(raw, 2)


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of eight groups from the head of a K block: d, dmin and twelve packed bytes; two of [n, 8].

    Eight 6-bit scales and eight 6-bit minima: the first four of each lie in the low 6 bits of bytes 0-3 (scales) and
    4-7 (minima); the last four have their low nibbles in bytes 8-11 and their top two bits in the bytes of the first.
    """
    first, second, rest = (_cut(raw, start, 4) for start in (4, 8, 12))
    scales = np.concatenate([first & np.uint8(63), (rest & np.uint8(15)) | _at_bit_4(first, 6, 2)], axis=1)
    minima = np.concatenate([second & np.uint8(63), (rest >> np.uint8(4)) | _at_bit_4(second, 6, 2)], axis=1)
    return _half(raw, 0) * scales, -(_half(raw, 2) * minima)


def _q4_k(raw: Bytes) -> Unpacked:
    return _nibbles(_cut(raw, 16, 128), 32), *_k_scales(raw)


def _at_bit_4(packed: Bytes, first: int, bits: int) -> Bytes:
    """The ``bits`` bits from bit ``first`` on, moved to where they belong above a nibble."""
    moved = packed << np.uint8(4 - first) if first < 4 else packed >> np.uint8(first - 4)
    return moved & np.uint8(((1 << bits) - 1) << 4)


def _high_bits(packed: Bytes, run: int, bits: int) -> Bytes:
    """Each run of bytes becomes 8 / ``bits`` runs of the bits above a nibble, lowest bits first."""
    each = 8 // bits
    out = np.empty((len(packed), each * packed.shape[1]), np.uint8)
    for i in range(each):
        _runs(out, run)[:, i::each] = _runs(_at_bit_4(packed, i * bits, bits), run)
    return out


def _q5_k(raw: Bytes) -> Unpacked:
    return _nibbles(_cut(raw, 48, 128), 32) | _high_bits(_cut(raw, 16, 32), 32, 1), *_k_scales(raw)


def _q6_k(raw: Bytes) -> Unpacked:
    numbers = _nibbles(_cut(raw, 0, 128), 64) | _high_bits(_cut(raw, 128, 64), 32, 2)
    scales = _half(raw, 208) * _cut(raw, 192, 16).view(np.int8)
    return (numbers - np.uint8(32)).view(np.int8), scales, None


BLOCKS = {
    "F32": Block(1, 4),
    "F16": Block(1, 2),
    "BF16": Block(1, 2),
    "Q8_0": Block(32, 34, _q8_0),
    "Q4_0": Block(32, 18, _q4_0),
    "Q4_1": Block(32, 20, _q4_1),
    "Q5_0": Block(32, 22, _q5_0),
    "Q5_1": Block(32, 24, _q5_1),
    "Q4_K": Block(256, 144, _q4_k),
    "Q5_K": Block(256, 176, _q5_k),
    "Q6_K": Block(256, 210, _q6_k),
}
"""The GGUF types that can be read, by name."""
