"""The native forward pass against the torch executor in float32, on the weights that the native one really uses.

Bounds. With bfloat16 weights, what differs is that activations are rounded to bfloat16 before each product (by 2^-9 at
most, 0.17% on average), and keys and values in the cache. With integer weights, activations are rounded to int8 in
groups of 32: in steps of absmax / 127, the absmax of 32 Gaussian numbers being at 2.1 deviations, by 0.48% of a
deviation on average. Products in a row add such errors up by their squares; two layers have nine on the path to the
logits, so about 0.5% and 1.4% of the logits' spread if nothing amplifies them, and 0.8% and 2.7% is the worst seen. The
bounds are not quite twice that. A wrong rotation, mask, bias or norm is off by more (the last test).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.executors.base import Executor, Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from tests.support.models import VARIANTS
from tests.support.native import FORMATS, available_isas, formatted_model

ISAS = available_isas()
if not ISAS:
    pytest.skip("the native extension is not built", allow_module_level=True)

from outrider import _native  # noqa: E402
from outrider.executors.native.executor import NativeExecutor  # noqa: E402
from outrider.executors.native.packing import pack_weights  # noqa: E402

BOUND = {"bf16": 0.015, "integer": 0.045}
CASES = [
    *((variant, "bf16") for variant in VARIANTS),
    *(("llama", format) for format in FORMATS if format != "bf16"),
    ("qwen3", "int8"),
    ("qwen2-window", "int4"),
]


def oracle(model: Model, quantization: str | None) -> TorchExecutor:
    """The torch executor in float32 over the packed weights' values."""
    packed = pack_weights(model.config, model.weights, quantization, _native.ThreadPool(1)).matrices()
    tensors = {}
    for name in model.weights.names():
        if name in packed:
            layout = packed[name].layout
            values = np.empty((layout.n, layout.k), np.float32)
            packed[name].dequantize(range(layout.n), values)
            tensors[name] = torch.from_numpy(values)
        else:
            tensors[name] = model.weights.tensor(name, torch.float32)
    plain = Model(model.name, model.config, TensorWeights(tensors))
    return TorchExecutor(plain, dtype="float32", kv_tokens=512)


def run(executor: Executor, layers: int) -> dict[str, torch.Tensor]:
    """Logits of a prompt in two chunks, of a tree with a second sequence beside it, and of what follows its path."""
    text = torch.randint(0, 128, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    a, b = executor.open(), executor.open()
    first = executor.forward([Segment.chain(a, text[:41])], hidden_layers=[0, 1, layers])
    executor.commit(a, range(41))
    results = {"prompt": first.logits.clone()} | {f"hidden {i}": h.float() for i, h in first.hidden.items()}
    results["chunk"] = executor.forward([Segment.chain(a, text[41:])]).logits.clone()
    executor.commit(a, range(29))
    tree = Segment(a, [1, 2, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 2, -1, 4])
    results["tree"] = executor.forward([Segment.chain(b, [5, 6, 7]), tree]).logits.clone()
    executor.commit(a, [0, 2, 4])
    results["after"] = executor.forward([Segment.chain(a, [9, 8, 7])]).logits.clone()
    return results


def worst_error(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Root mean square of the difference over the spread of the values, the worst of all outputs."""
    errors = {name: float((have[name] - want[name]).pow(2).mean().sqrt() / want[name].std()) for name in want}
    return max(errors.values())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("variant", "format"), CASES)
def test_close_to_the_oracle(variant: str, format: str, isa: str) -> None:
    model, quantization = formatted_model(variant, format)
    native = NativeExecutor(model, kv_tokens=512, threads=1, quantization=quantization, isa=isa)
    layers = model.config.num_layers
    error = worst_error(run(native, layers), run(oracle(model, quantization), layers))
    assert error < BOUND["bf16" if format == "bf16" else "integer"]


@pytest.mark.parametrize("change", [{"rope_theta": 9000.0}, {"sliding_window": 30}, {"rms_norm_eps": 0.3}])
def test_another_computation_is_not_close(change: dict[str, float]) -> None:
    from dataclasses import replace

    model, _ = formatted_model("llama", "bf16")
    other = replace(model, config=replace(model.config, **change))  # type: ignore[arg-type]
    native = NativeExecutor(other, kv_tokens=512, threads=1)
    layers = model.config.num_layers
    assert worst_error(run(native, layers), run(oracle(model, None), layers)) > 2 * BOUND["bf16"]
