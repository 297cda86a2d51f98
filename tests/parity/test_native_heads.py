"""Learned drafters on the native executor against the torch executor in float32, on the weights really used.

The bound is that of tests/parity/test_native_torch.py for integer weights: a head is int8, and its row goes through no
more products in a row than a model of two blocks.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.errors import ConfigError, KVCacheFullError, UsageError
from outrider.executors.base import Executor, Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from tests.support.head_models import HEADS, features, head_model
from tests.support.models import random_model
from tests.support.native import available_isas, formatted_model

ISAS = available_isas()
if not ISAS:
    pytest.skip("the native extension is not built", allow_module_level=True)

from outrider.executors.native import cache  # noqa: E402
from outrider.executors.native.executor import NativeExecutor  # noqa: E402
from outrider.executors.native.packing import PackedWeights, pack_weights  # noqa: E402

BOUND = 0.045
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
LACKING = {
    "eagle": (EMBEDDING, OUTPUT),
    "eagle3": (EMBEDDING,),
    "mtp": (OUTPUT,),
    "norm-first": (EMBEDDING, OUTPUT),
    "two-blocks": (),
}
"""What each head takes from its target: both matrices, one, the other, none."""


def open_target(format: str = "int4", isa: str | None = None, threads: int = 1) -> NativeExecutor:
    model, quantization = formatted_model("llama", format, seed=5)
    return NativeExecutor(model, kv_tokens=512, threads=threads, quantization=quantization, isa=isa)


def open_head(kind: str, target: NativeExecutor) -> tuple[Model, NativeExecutor]:
    model = head_model(kind, without=LACKING[kind])
    return model, target.open_head(model, kv_tokens=512, max_context=512)


def oracle(model: Model, head: NativeExecutor) -> TorchExecutor:
    """The torch executor in float32 over the values of the head's packed matrices."""
    tensors = {name: model.weights.tensor(name, torch.float32) for name in model.weights.names()}
    for name, matrix in head._matrices.items():
        values = np.empty((matrix.layout.n, matrix.layout.k), np.float32)
        matrix.dequantize(range(matrix.layout.n), values)
        tensors[name] = torch.from_numpy(values)
    return TorchExecutor(Model(model.name, model.config, TensorWeights(tensors)), dtype="float32", kv_tokens=512)


def run(head: Executor) -> dict[str, torch.Tensor]:
    """What a drafter does: rows with true features, a tree below them that is dropped, and so on."""
    layers = head.config.num_layers
    text = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    given = features(60, 64)
    a, b = head.open(), head.open()
    first = head.forward([Segment.chain(a, text[:41], logits=[40])], [0, layers], given[:41])
    head.commit(a, range(41))
    results = {"prompt": first.logits.clone()} | {f"hidden {i}": h.clone() for i, h in first.hidden.items()}
    batch = [Segment.chain(b, [5, 6, 7]), Segment(a, [1, 2, 3], [-1, -1, 0])]
    output = head.forward(batch, [layers], features(6, 64, seed=2))
    results["tree"] = output.logits.clone()
    output = head.forward([Segment(a, [4, 5, 6, 7], [0, 2, 2, 1])], [layers], output.hidden[layers][[3, 5, 5, 4]])
    results["next level"] = output.logits.clone()
    head.commit(a, ())
    head.commit(b, [0, 1])
    batch = [Segment.chain(a, text[41:60]), Segment.chain(b, [9])]
    output = head.forward(batch, [layers], torch.cat((given[41:], features(1, 64, seed=3))))
    head.commit(a, range(19))
    head.check_integrity()
    return results | {"after": output.logits.clone(), "hidden after": output.hidden[layers].clone()}


def worst_error(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Root mean square of the difference over the spread of the values, the worst of all outputs."""
    assert {name: x.shape for name, x in have.items()} == {name: x.shape for name, x in want.items()}
    return max(float((have[name] - want[name]).pow(2).mean().sqrt() / want[name].std()) for name in want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["bf16", "int4"])
@pytest.mark.parametrize("kind", HEADS)
def test_close_to_the_oracle(kind: str, format: str, isa: str) -> None:
    model, head = open_head(kind, open_target(format, isa))
    assert head.isa == isa
    assert worst_error(run(head), run(oracle(model, head))) < BOUND


@pytest.mark.parametrize("name", ["model.embed_norm.weight", "model.feature_norm.weight", "model.fuse.weight"])
def test_another_fusion_is_not_close(name: str) -> None:
    model, head = open_head("mtp", open_target())
    other = {key: model.weights.tensor(key, torch.float32) for key in model.weights.names()}
    other[name] = other[name].roll(1, -1)
    changed = Model("changed", model.config, TensorWeights(other))
    reference = oracle(changed, head) if name != "model.fuse.weight" else None
    if reference is None:
        reference = oracle(changed, open_target().open_head(changed, kv_tokens=512, max_context=512))
    assert worst_error(run(head), run(reference)) > 2 * BOUND


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_of_the_target_are_shared(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes in the target's memory changes in the head's."""
    packed: list[PackedWeights] = []
    monkeypatch.setattr(cache, "pack_weights", lambda *given: packed.append(pack_weights(*given)) or packed[-1])
    target = NativeExecutor(random_model("llama", tie_embeddings=tied), kv_tokens=64, threads=1)
    _, head = open_head("eagle", target)
    own = sum(matrix.layout.bytes for name, matrix in head._matrices.items() if name not in (EMBEDDING, OUTPUT))
    assert head.weight_bytes == own
    seq, given = head.open(), features(1, 64)
    before = head.forward([Segment.chain(seq, [3])], [0], given)
    logits, entered = before.logits.clone(), before.hidden[0].clone()
    head.commit(seq, ())
    place = next(place for place in packed[0].places if place.name == (EMBEDDING if tied else OUTPUT))
    packed[0].arena.data[place.offset : place.offset + place.layout.bytes] = 0
    after = head.forward([Segment.chain(seq, [3])], [0], given)
    assert logits.abs().max() > 0.1
    assert after.logits.abs().max() == 0
    assert torch.equal(after.hidden[0], entered) is not tied


@pytest.mark.parametrize("wrong", [None, torch.zeros(2, 64), torch.zeros(3, 32), torch.zeros(3, 64).bfloat16()])
def test_wrong_features(wrong: torch.Tensor | None) -> None:
    _, head = open_head("eagle3", open_target())
    seq = head.open()
    with pytest.raises(UsageError, match=r"^[^\n]*feature[^\n]*$"):
        head.forward([Segment.chain(seq, [1, 2, 3])], features=wrong)
    assert head.pending(seq) == 0


def test_features_for_a_plain_model() -> None:
    target = open_target()
    with pytest.raises(UsageError, match="fusion"):
        target.forward([Segment.chain(target.open(), [1])], features=features(1, 64))


def test_features_may_lie_anyhow() -> None:
    _, head = open_head("mtp", open_target())
    seq, wide = head.open(), features(64, 5)
    logits = head.forward([Segment.chain(seq, [1, 2, 3, 4, 5])], features=wide.T).logits.clone()
    head.commit(seq, ())
    assert torch.equal(head.forward([Segment.chain(seq, [1, 2, 3, 4, 5])], features=wide.T.contiguous()).logits, logits)


def test_a_full_cache_changes_nothing() -> None:
    head = open_target().open_head(head_model("eagle3"), kv_tokens=32, max_context=32)
    seq, other = head.open(), head.open()
    head.forward([Segment.chain(seq, [1] * 20)], features=features(20, 64))
    with pytest.raises(KVCacheFullError):
        head.forward([Segment.chain(other, [1] * 20)], features=features(20, 64))
    assert (head.pending(seq), head.pending(other)) == (20, 0)
    head.check_integrity()


def test_a_head_of_another_target() -> None:
    target = NativeExecutor(random_model("llama", vocab_size=96), kv_tokens=64, threads=1)
    with pytest.raises(ConfigError, match=r"embed_tokens.weight.*\(96, 64\).*\(128, 64\)"):
        open_head("eagle3", target)
    with pytest.raises(ConfigError, match=r"lm_head.weight.*\(96, 64\).*\(128, 64\)"):
        open_head("mtp", target)


def test_a_head_has_its_own_context() -> None:
    head = open_target().open_head(head_model("eagle3", max_position=40), kv_tokens=64, max_context=512)
    assert (head.max_context, head.total_tokens) == (40, 64)


def test_a_head_outlives_its_target_and_leaves_nothing_behind() -> None:
    before = num_threads()
    target = open_target(threads=3)
    _, head = open_head("eagle", target)
    dense = target.dense(features(8, 64))
    assert num_threads() == before + 2
    gone = [weakref.ref(target), weakref.ref(head), weakref.ref(dense)]
    del target
    gc.collect()
    assert head.forward([Segment.chain(head.open(), [1] * 40)], features=features(40, 64)).logits.isfinite().all()
    assert dense(features(3, 64)).isfinite().all()
    del head, dense
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert num_threads() == before


def num_threads() -> int:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("this system does not list a process's threads")
    return len(list(tasks.iterdir()))


@pytest.mark.parametrize("isa", ISAS)
def test_dense(isa: str) -> None:
    """Activations and weights in int8: 0.5% of the spread each, and their squares add up."""
    executor = open_target(isa=isa)
    weight, x = features(40, 192, seed=7), features(33, 192, seed=8)
    want = x @ weight.T
    dense = executor.dense(weight.bfloat16())
    y = dense(x)
    assert float((y - want).pow(2).mean().sqrt() / want.std()) < 0.015
    assert torch.equal(y, torch.cat([dense(row[None]) for row in x]))
    assert torch.equal(y[::2], dense(x[::2]))
    assert torch.equal(y, open_target(isa=isa, threads=2).dense(weight.bfloat16())(x))
    assert dense(x[:0]).shape == (0, 40)
    with pytest.raises(UsageError, match=r"\(33, 40\); \(rows, 192\)"):
        dense(y)
    with pytest.raises(UsageError, match="float32"):
        dense(x.bfloat16())


def test_a_matrix_that_no_kernel_takes() -> None:
    with pytest.raises(UsageError, match="32"):
        open_target().dense(features(8, 40))


def test_the_cost_of_a_head_is_measured() -> None:
    _, head = open_head("eagle3", open_target())
    curve = head.measure_cost(rows=(1, 4), context=16, repeats=1)
    assert curve.rows == (1, 4)
    assert all(0 < seconds < 10 for seconds in curve.seconds)
    assert head.free_tokens == head.total_tokens
