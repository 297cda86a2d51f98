"""Packing: which form weights take, that their values stay, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.core.errors import ConfigError, UsageError
from outrider.models.weights import TensorWeights
from tests.support.models import random_model
from tests.support.native import SCALES, available_isas, formatted_model

if not available_isas():
    pytest.skip("the native extension is not built", allow_module_level=True)

from outrider import _native
from outrider.executors.native.packing import pack_weights

POOL = _native.ThreadPool(2)
BITS = {"Q4_0": "int4", "Q4_1": "int4", "Q4_K": "int4", "Q5_0": "int5", "Q5_1": "int5", "Q5_K": "int5", "Q6_K": "int6"}


def dequantized(matrix: _native.PackedMatrix) -> torch.Tensor:
    values = np.empty((matrix.layout.n, matrix.layout.k), np.float32)
    matrix.dequantize(range(matrix.layout.n), values)
    return torch.from_numpy(values)


@pytest.mark.parametrize("kind", SCALES)
def test_gguf_blocks_keep_their_values(kind: str) -> None:
    """Up to the rounding of a product of three float32 numbers: two units in the last place of the largest term."""
    model, _ = formatted_model("llama", kind)
    for name, matrix in pack_weights(model.config, model.weights, None, POOL).matrices().items():
        expected = model.weights.tensor(name, torch.float32)
        values = dequantized(matrix)
        assert matrix.layout.format.name == BITS.get(kind, "int8")
        assert float((values - expected).abs().max()) <= 2**-22 * float(expected.abs().max()), name


def test_floats_become_bfloat16() -> None:
    model = random_model("llama", num_layers=1)
    for name, matrix in pack_weights(model.config, model.weights, None, POOL).matrices().items():
        assert torch.equal(dequantized(matrix), model.weights.tensor(name, torch.bfloat16).float()), name


@pytest.mark.parametrize(("quantization", "worst"), [("int8", 0.006), ("int4", 0.10)])
def test_the_error_of_quantisation_is_reported(quantization: str, worst: float) -> None:
    model = random_model("llama", num_layers=1)
    packed = pack_weights(model.config, model.weights, quantization, POOL)
    for place in packed.places:
        expected = model.weights.tensor(place.name, torch.float32)
        values = dequantized(packed.matrices()[place.name])
        error = float((values - expected).norm() / expected.norm())
        assert place.error == pytest.approx(error, rel=1e-3)
        assert 0 < error < worst
    total = packed.error(quantization)
    assert total.worst == max(place.error for place in packed.places)
    assert [place.error for place in packed.places if place.name == total.worst_tensor] == [total.worst]
    weighed = [(math.prod(model.weights.raw(place.name).shape), place.error) for place in packed.places]
    expected_square = sum(size * error**2 for size, error in weighed) / sum(size for size, _ in weighed)
    assert total.relative == pytest.approx(math.sqrt(expected_square))
    assert str(total).startswith(f"quantised to {quantization}: relative error ")


def test_quantised_weights_are_not_quantised_again() -> None:
    model, _ = formatted_model("llama", "Q8_0")
    with pytest.raises(ConfigError, match="for float weights"):
        pack_weights(model.config, model.weights, "int4", POOL)


def test_sizes_that_do_not_fit_are_named() -> None:
    model = random_model("llama", num_layers=1, hidden_size=72, head_dim=18)
    with pytest.raises(UsageError, match=r"embed_tokens.* multiple of 32"):
        pack_weights(model.config, model.weights, None, POOL)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = random_model("llama", num_layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {n: model.weights.tensor(n, torch.float32).clone() for n in model.weights.names()}
    tensors[name][3, 5] = float("nan")
    with pytest.raises(UsageError, match="not finite"):
        pack_weights(model.config, TensorWeights(tensors), "int8", POOL)
