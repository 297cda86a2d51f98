"""From a model's weights to packed matrices: which form each takes, and the packing itself.

Quantised tensors of a GGUF file keep their values: they are regrouped, not requantised. Float tensors become bfloat16,
or int8 or int4 in groups of 32 if that is asked for.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider import _native
from outrider.core.errors import ConfigError, UnsupportedModelError, UsageError
from outrider.executors.base import QuantizationError
from outrider.models.config import ModelConfig, weight_shapes

if TYPE_CHECKING:
    from outrider.models.weights import RawTensor, Weights

GGML_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
FLOAT_TYPES = {"F32": _native.FloatType.f32, "F16": _native.FloatType.f16, "BF16": _native.FloatType.bf16}
QUANTIZATIONS = {
    "int8": (_native.WeightFormat.int8, False),
    "int4": (_native.WeightFormat.int4, True),
}
"""Name -> format of the codes, and whether a group has a minimum."""

_ALIGNMENT = 4096


@dataclass(frozen=True)
class Place:
    """Where a packed matrix lies in the arena. name: canonical. error: relative, of the quantisation done here."""

    name: str
    layout: _native.PackedLayout
    offset: int
    error: float = 0.0


@dataclass(frozen=True)
class PackedWeights:
    """All matrices of a model in one piece of memory."""

    arena: _native.Arena
    places: tuple[Place, ...]

    def matrices(self) -> Mapping[str, _native.PackedMatrix]:
        return {place.name: self.arena.matrix(place.offset, place.layout) for place in self.places}

    def error(self, quantization: str) -> QuantizationError:
        """What quantising the matrices here brought in."""
        sizes = [place.layout.n * place.layout.k for place in self.places]
        squares = sum(size * place.error**2 for size, place in zip(sizes, self.places, strict=True))
        worst = max(self.places, key=lambda place: place.error)
        return QuantizationError(quantization, math.sqrt(squares / sum(sizes)), worst.error, worst.name)


def pack_weights(
    config: ModelConfig,
    weights: Weights,
    quantization: str | None,
    pool: _native.ThreadPool,
    without: Collection[str] = (),
) -> PackedWeights:
    """Pack every matrix of the model, but for those named in ``without``.

    Raises ConfigError, UnsupportedModelError or ModelFileError.
    """
    layouts = {}
    for name, raw in _matrices(config, weights, without):
        try:
            layouts[name] = _layout(raw, quantization)
        except UsageError as error:
            raise type(error)(f"{name} ({raw.kind}): {error}") from None
    offsets, end = {}, 0
    for name, layout in layouts.items():
        offsets[name] = end
        end += -(-layout.bytes // _ALIGNMENT) * _ALIGNMENT
    arena = _native.Arena(end)
    places = []
    for name, raw in _matrices(config, weights, without):
        lost = _pack(arena, offsets[name], raw, quantization, pool)
        places.append(Place(name, layouts[name], offsets[name], lost))
        _forget_pages(raw)
    return PackedWeights(arena, tuple(places))


def _matrices(config: ModelConfig, weights: Weights, without: Collection[str]) -> Iterator[tuple[str, RawTensor]]:
    for name, shape in weight_shapes(config).items():
        if len(shape) == 2 and name not in without:
            yield name, weights.raw(name)


def _layout(raw: RawTensor, quantization: str | None) -> _native.PackedLayout:
    if raw.kind not in GGML_TYPES:
        raise UnsupportedModelError(f"the native executor knows {', '.join(GGML_TYPES)}")
    n, k = raw.shape
    if quantization is None:
        return _native.gguf_layout(GGML_TYPES[raw.kind], n, k)
    if raw.kind not in FLOAT_TYPES:
        raise ConfigError(f"quantization={quantization!r} is for float weights; leave it out")
    format, has_min = QUANTIZATIONS[quantization]
    return _native.PackedLayout(format, _native.ScaleKind.f16, has_min, n, k)


def _pack(
    arena: _native.Arena, offset: int, raw: RawTensor, quantization: str | None, pool: _native.ThreadPool
) -> float:
    n, k = raw.shape
    if quantization is None:
        arena.pack_gguf(offset, GGML_TYPES[raw.kind], raw.data, n, k, pool)
        return 0.0
    matrix, error = _native.quantize(QUANTIZATIONS[quantization][0], FLOAT_TYPES[raw.kind], raw.data, n, k, pool)
    arena.store(offset, matrix)
    return error


def _forget_pages(raw: RawTensor) -> None:
    """Let go of a mapped file's pages once they are packed: else the whole file counts as this process's memory."""
    base: object = raw.data
    while base is not None and not isinstance(base, mmap.mmap | memoryview):
        base = getattr(base, "base", None)
    source = base.obj if isinstance(base, memoryview) else base
    if isinstance(source, mmap.mmap) and hasattr(source, "madvise"):
        source.madvise(mmap.MADV_DONTNEED)
