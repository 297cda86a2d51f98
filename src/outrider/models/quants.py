"""Dequantisation of GGUF tensors, to the very float32 values that ggml's own reference code gives.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block is a run of elements of one row with
its scales. Every value is computed in float32 in the order of the reference (scale by sub-scale first, then by the
quant, then the offset), so that the results are equal bit for bit; only then is it rounded to the dtype asked for.

The arithmetic is NumPy's, in small chunks on threads of our own, rather than PyTorch's: an OpenMP barrier after every
small operation makes loading thirty times slower as soon as another process wants the same cores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

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
"""Elements decoded at a time: intermediates stay in the cache, and PyTorch rounds this few on the calling thread."""

_CHUNKS_PER_TASK = 16


@dataclass(frozen=True)
class Block:
    """elements and bytes of one block; decode: ([n, bytes] uint8, [n, elements] float32 to fill)."""

    elements: int
    bytes: int
    decode: Callable[[Bytes, Floats], None]


def dequantize(kind: str, data: Bytes, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values of a tensor stored as ``kind`` (a key of BLOCKS) in ``data``, in ``dtype`` (None: float32)."""
    import torch

    block = BLOCKS[kind]
    blocks = data.reshape(-1, block.bytes)
    out = torch.empty(math.prod(shape), dtype=dtype or torch.float32)
    rows = out.view(-1, block.elements)
    step = _CHUNK // block.elements

    def decode(start: int) -> None:
        """One task: the chunks from block ``start`` on."""
        scratch = torch.empty(step, block.elements)
        with np.errstate(invalid="ignore"):  # damaged scales (inf, NaN) show in the values, as in the reference
            for at in range(start, min(start + step * _CHUNKS_PER_TASK, len(blocks)), step):
                part, target = blocks[at : at + step], rows[at : at + step]
                values = target if target.dtype == torch.float32 else scratch[: len(part)]
                block.decode(part, values.numpy())
                if values is not target:
                    target.copy_(values)

    starts = range(0, len(blocks), step * _CHUNKS_PER_TASK)
    if len(starts) == 1:
        decode(0)
    else:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
            list(pool.map(decode, starts))
    return out.view(shape)


def _half(raw: Bytes) -> Floats:
    """Two bytes a row as one float16, widened: [n, 2] -> [n, 1]."""
    return raw.copy().view("<f2").astype(np.float32)


def _f32(raw: Bytes, out: Floats) -> None:
    out[...] = raw.view("<f4")


def _f16(raw: Bytes, out: Floats) -> None:
    out[...] = raw.view("<f2")


def _bf16(raw: Bytes, out: Floats) -> None:
    np.left_shift(raw.view("<u2"), 16, dtype=np.uint32, out=out.view(np.uint32))


def _q8_0(raw: Bytes, out: Floats) -> None:
    np.multiply(raw[:, 2:].view(np.int8), _half(raw[:, :2]), out=out)


def _nibbles(raw: Bytes, out: Floats) -> None:
    """Low nibbles into the first half of each run, high nibbles into the second: [..., k] -> [..., 2k]."""
    half = raw.shape[-1]
    out[..., :half] = raw & 15
    out[..., half:] = raw >> 4


def _q4_0(raw: Bytes, out: Floats) -> None:
    _nibbles(raw[:, 2:], out)
    out -= 8
    out *= _half(raw[:, :2])


def _q4_1(raw: Bytes, out: Floats) -> None:
    _nibbles(raw[:, 4:], out)
    out *= _half(raw[:, :2])
    out += _half(raw[:, 2:4])


def _five_bits(low: Bytes, high: Bytes, out: Floats) -> None:
    """Numbers 0 … 31 from low nibbles [n, 16] and fifth bits [n, 4] (bit j belongs to element j): -> [n, 32]."""
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    fifth <<= 4
    out[:, :16] = (low & 15) | fifth[:, :16]
    out[:, 16:] = (low >> 4) | fifth[:, 16:]


def _q5_0(raw: Bytes, out: Floats) -> None:
    _five_bits(raw[:, 6:], raw[:, 2:6], out)
    out -= 16
    out *= _half(raw[:, :2])


def _q5_1(raw: Bytes, out: Floats) -> None:
    _five_bits(raw[:, 8:], raw[:, 4:8], out)
    out *= _half(raw[:, :2])
    out += _half(raw[:, 2:4])


def _k_scales(raw: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes: [n, 12] -> two of [n, 8].

    The first four of each lie in the low 6 bits of bytes 0-3 (scales) and 4-7 (minima); the last four have their low
    nibbles in bytes 8-11 and their top two bits in the bytes of the first four.
    """
    first, second, rest = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _scale_k(raw: Bytes, out: Floats) -> None:
    """Turn numbers [n, 256] into values: scale by d * scale of its group of 32, then subtract dmin * minimum."""
    scales, minima = _k_scales(raw[:, 4:16])
    groups = out.reshape(-1, 8, 32)
    groups *= (_half(raw[:, 0:2]) * scales)[:, :, None]
    groups -= (_half(raw[:, 2:4]) * minima)[:, :, None]


def _q4_k(raw: Bytes, out: Floats) -> None:
    _nibbles(raw[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    _scale_k(raw, out)


def _q5_k(raw: Bytes, out: Floats) -> None:
    low = raw[:, 48:].reshape(-1, 4, 32)
    high = raw[:, 16:48]
    runs = out.reshape(-1, 4, 2, 32)
    for i in range(4):
        runs[:, i, 0] = (low[:, i] & 15) | (((high >> (2 * i)) & 1) << 4)
        runs[:, i, 1] = (low[:, i] >> 4) | (((high >> (2 * i + 1)) & 1) << 4)
    _scale_k(raw, out)


def _q6_k(raw: Bytes, out: Floats) -> None:
    low = raw[:, :128].reshape(-1, 2, 2, 32)
    high = raw[:, 128:192].reshape(-1, 2, 32)
    runs = out.reshape(-1, 2, 4, 32)
    for i in range(4):
        nibble = low[:, :, i] & 15 if i < 2 else low[:, :, i - 2] >> 4
        runs[:, :, i] = nibble | (((high >> (2 * i)) & 3) << 4)
    out -= 32
    groups = out.reshape(-1, 16, 16)
    groups *= (_half(raw[:, 208:210]) * raw[:, 192:208].view(np.int8))[:, :, None]


BLOCKS = {
    "F32": Block(1, 4, _f32),
    "F16": Block(1, 2, _f16),
    "BF16": Block(1, 2, _bf16),
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
