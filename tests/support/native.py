"""Models for tests of the native executor: every weight format it reads, over small random shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from outrider.models.loader import Model
from outrider.models.quants import BLOCKS, dequantize
from outrider.models.weights import FLOAT_KINDS, RawTensor, TensorWeights, Weights
from tests.support.models import random_model

ISAS = ("portable", "avx2", "avx512", "amx")

SCALES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 1.0},
    "Q4_1": {0: 1.0, 2: -7.5},
    "Q5_0": {0: 1.0},
    "Q5_1": {0: 1.0, 2: -15.5},
    "Q8_0": {0: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
}
"""Where in a block its float16 numbers (scale, then minimum) start, and how large they are relative to the scale, so
that random codes make weights around zero. Every other byte of a block may hold anything."""


def available_isas() -> list[str]:
    """The instruction sets of this machine; none if the extension is not built."""
    from outrider.executors.native import why_unavailable

    if why_unavailable() is not None:
        return []
    from outrider import _native

    return [isa for isa in ISAS if _native.isa_available(isa)]


class RawWeights(Weights):
    """Float tensors for vectors, blocks of random bits for matrices, as a GGUF file of one kind would hold them."""

    def __init__(self, base: TensorWeights, kind: str, seed: int) -> None:
        self._raw: dict[str, RawTensor] = {}
        generator = np.random.default_rng(seed)
        for name in base.names():
            raw = base.raw(name)
            self._raw[name] = raw if len(raw.shape) == 1 else RawTensor(kind, raw.shape, _blocks(raw, kind, generator))

    def names(self) -> Iterable[str]:
        return self._raw

    def are_floats(self) -> bool:
        return all(raw.kind in FLOAT_KINDS for raw in self._raw.values())

    def raw(self, name: str) -> RawTensor:
        return self._raw[name]

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raw = self._raw[name]
        return dequantize(raw.kind, raw.data, raw.shape, dtype)


def _blocks(raw: RawTensor, kind: str, generator: np.random.Generator) -> Any:
    """Random blocks, scaled so that the weights have about the spread of ``raw``'s."""
    block = BLOCKS[kind]
    count = math.prod(raw.shape) // block.elements
    data = generator.integers(0, 256, (count, block.bytes), dtype=np.uint8)
    for scale in (1.0, None):
        if scale is None:
            probe = dequantize(kind, data.reshape(-1), raw.shape, torch.float32)
            scale = float(np.std(raw.data.view(np.float32))) / float(probe.std())
        for start, factor in SCALES[kind].items():
            halves = (factor * scale * generator.uniform(0.75, 1.25, count)).astype(np.float16)
            data[:, start : start + 2] = halves.view(np.uint8).reshape(count, 2)
    return data.reshape(-1)


FORMATS = ("bf16", "int8", "int4", *SCALES)
"""Weight formats: floats as they are, quantised at load, and the kinds of GGUF blocks."""

_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


@functools.cache
def formatted_model(variant: str, format: str, seed: int = 0) -> tuple[Model, str | None]:
    """A small random model whose matrices come in ``format``, and the quantisation to ask the executor for."""
    if format in ("bf16", "int8", "int4"):
        return random_model(variant, seed=seed, num_layers=2, **_short(variant)), None if format == "bf16" else format
    model = random_model(variant, seed=seed, num_layers=2, **_short(variant), **_WIDE)
    assert isinstance(model.weights, TensorWeights)
    return replace(model, weights=RawWeights(model.weights, format, seed)), None


def _short(variant: str) -> dict[str, Any]:
    """What has to change with the number of layers."""
    changes = {"qwen2-window": {"window_layers": (False, True)}, "smollm3": {"no_rope_layers": (1,)}}
    return changes.get(variant, {})
