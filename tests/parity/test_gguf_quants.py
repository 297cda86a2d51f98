"""Dequantisation against the `gguf` package: the same float32 values, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from outrider.models.quants import BLOCKS, TYPE_NAMES, dequantize

_SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
_SCALES |= {"Q6_K": (208,)}
"""Where each kind keeps its float16 scales, so that random blocks can be given finite ones."""


def blocks(kind: str, count: int, seed: int, *, finite: bool = True) -> np.ndarray:
    """Random bytes as ``count`` blocks; finite: scales between 2^-24 and 65504, of both signs, subnormals included."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, BLOCKS[kind].bytes), dtype=np.uint8)
    if finite:
        places = _SCALES.get(kind, range(0, BLOCKS[kind].bytes, 2) if kind in ("F16", "BF16") else ())
        for at in places:
            raw[:, at + 1] &= 0xBB  # clears one exponent bit: neither infinite nor NaN
    if finite and kind == "F32":
        raw = rng.standard_normal((count, 1), dtype=np.float32).view(np.uint8)
    return raw


def reference(kind: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("count", [1, 3, 1029])
def test_bits_of_float32(kind: str, count: int) -> None:
    raw = blocks(kind, count, seed=count)
    ours = dequantize(kind, raw, (count * BLOCKS[kind].elements,)).numpy()
    expected = reference(kind, raw)
    assert np.isfinite(expected).all()
    assert np.array_equal(ours.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_bits_over_many_threads(kind: str) -> None:
    """More blocks than one task takes, and a last chunk that is not full."""
    count = (1 << 20) // BLOCKS[kind].elements + 5
    raw = blocks(kind, count, seed=7)
    ours = dequantize(kind, raw, (count * BLOCKS[kind].elements,)).numpy()
    assert np.array_equal(ours.view(np.uint32), reference(kind, raw).view(np.uint32))


@pytest.mark.parametrize("kind", BLOCKS)
def test_infinite_and_nan_scales_show_as_in_the_reference(kind: str) -> None:
    count = (1 << 20) // BLOCKS[kind].elements  # enough for several threads, whose warnings are their own
    raw = blocks(kind, count, seed=3, finite=False)
    ours = dequantize(kind, raw, (count * BLOCKS[kind].elements,)).numpy()
    assert np.array_equal(ours, reference(kind, raw), equal_nan=True)


def test_no_elements() -> None:
    assert dequantize("Q4_K", np.empty(0, np.uint8), (0, 256)).shape == (0, 256)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_the_float32_value_rounded_once(kind: str, dtype: torch.dtype) -> None:
    raw = blocks(kind, 130, seed=11)
    shape = (130, BLOCKS[kind].elements)
    expected = torch.from_numpy(reference(kind, raw)).reshape(shape).to(dtype)
    ours = dequantize(kind, raw, shape, dtype)
    assert ours.dtype == dtype
    assert torch.equal(ours, expected)


def test_sizes_and_numbers_are_those_of_the_format() -> None:
    for kind, block in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == (block.elements, block.bytes)
    for number, name in TYPE_NAMES.items():
        if number in gguf.GGMLQuantizationType._value2member_map_:
            assert gguf.GGMLQuantizationType(number).name == name


def test_many_rows_within_inference_mode() -> None:
    """Large enough for several threads, which do not share the caller's mode."""
    data = np.random.default_rng(0).integers(0, 255, (1 << 16, BLOCKS["Q8_0"].bytes), dtype=np.uint8)
    data[:, :2] = np.array([0x00, 0x3C], dtype=np.uint8)
    shape = (1 << 16, BLOCKS["Q8_0"].elements)
    plain = dequantize("Q8_0", data, shape)
    with torch.inference_mode():
        assert torch.equal(dequantize("Q8_0", data, shape), plain)
