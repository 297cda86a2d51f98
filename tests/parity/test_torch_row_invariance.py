"""A row's logits have the same bits however it is computed: alone, in a chain, a chunk, a tree or a batch.

This is an observed property of the matrix libraries under the torch executor (see `outrider.executors.torch.products`),
not one that they promise. It is held on the kind of CPU on which it was observed. On others a test that finds different
bits, if they are close, is skipped and says so.
"""

from __future__ import annotations

import random

import pytest
import torch

from outrider.executors.base import Segment
from outrider.executors.torch.dtype import cpu_has_bfloat16
from outrider.executors.torch.executor import TorchExecutor
from tests.parity.torch_support import grow_tree, logits_in_chunks, on, prefill, tokens
from tests.support.models import random_model

VOCABULARY = 320
SHAPES = {
    "small": {"vocab_size": VOCABULARY},
    "smollm2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "num_layers": 2,
    },
    "qwen2.5-1.5b": {
        "vocab_size": VOCABULARY,
        "hidden_size": 1536,
        "num_heads": 12,
        "num_kv_heads": 2,
        "head_dim": 128,
        "intermediate_size": 2240,
        "num_layers": 2,
        "qkv_bias": True,
    },
    "window, q and k norms": {"vocab_size": VOCABULARY, "sliding_window": 12, "qk_norm": True},
}

CAPABILITIES = torch.cpu.get_capabilities()
CPU = str(CAPABILITIES.get("cpu_name"))
OBSERVED = "AMD" in CPU and CAPABILITIES.get("avx512_bf16", False)
CLOSE = 0.1  # for bfloat16: logits spread by about 1, and rounding leaves differences of about 0.02


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if torch.equal(actual, expected):
        return
    torch.testing.assert_close(actual, expected, rtol=0, atol=CLOSE)
    what = f"bits differ, by up to {(actual - expected).abs().max():.3g}"
    if not OBSERVED:
        pytest.skip(f"the libraries' kernels for {CPU} depend on the number of rows: {what}")
    pytest.fail(what)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    if request.param == "bfloat16" and not cpu_has_bfloat16():
        pytest.skip("this CPU has no bfloat16 dot products; PyTorch emulates them with other kernels")
    return str(request.param)


@pytest.fixture(scope="module", params=list(SHAPES))
def executor(request: pytest.FixtureRequest, dtype: str) -> TorchExecutor:
    model = random_model(max_position=2048, **SHAPES[request.param])
    return TorchExecutor(model, dtype=dtype, kv_tokens=8192)


@pytest.fixture(scope="module")
def sequence() -> list[int]:
    return tokens(random.Random(11), 300, VOCABULARY)


@pytest.fixture(scope="module")
def alone(executor: TorchExecutor, sequence: list[int]) -> torch.Tensor:
    """Logits of plain decoding, one row after another."""
    return logits_in_chunks(executor, sequence, 1)


@pytest.mark.parametrize("chunk", [2, 3, 5, 8, 17, 64, 100, 300])
def test_chunks(executor: TorchExecutor, sequence: list[int], alone: torch.Tensor, chunk: int) -> None:
    assert_same(logits_in_chunks(executor, sequence, chunk), alone)


@pytest.mark.parametrize("seed", range(12))
def test_trees(executor: TorchExecutor, sequence: list[int], alone: torch.Tensor, seed: int) -> None:
    rng = random.Random(seed)
    length = rng.choice([0, 1, 7, 15, 16, 100, 127, 200, 260])
    seq = prefill(executor, sequence[:length], chunk=rng.choice([1, 16, 50, 300]))
    path = sequence[length : length + rng.randrange(1, 9)]
    segment, rows = grow_tree(rng, path, rng.randrange(0, 24), VOCABULARY)
    logits = executor.forward([on(seq, segment)]).logits
    assert_same(logits[rows], alone[length : length + len(path)])
    executor.commit(seq, rows)
    after = length + len(path)
    assert_same(executor.forward([Segment.chain(seq, [sequence[after]])]).logits[0], alone[after])
    executor.close(seq)


@pytest.mark.parametrize("seed", range(6))
def test_trees_grown_level_by_level(
    executor: TorchExecutor, sequence: list[int], alone: torch.Tensor, seed: int
) -> None:
    rng = random.Random(100 + seed)
    length = rng.randrange(20, 200)
    seq = prefill(executor, sequence[:length])
    parent = -1
    for depth in range(5):
        first, siblings = executor.pending(seq), rng.randrange(1, 5)
        at = rng.randrange(siblings)
        row_tokens = [sequence[length + depth] if i == at else rng.randrange(VOCABULARY) for i in range(siblings)]
        parents = [parent if i == at else rng.randrange(-1, first) for i in range(siblings)]
        logits = executor.forward([Segment(seq, row_tokens, parents)]).logits
        assert_same(logits[at], alone[length + depth])
        parent = first + at
    executor.close(seq)


@pytest.mark.parametrize("seed", range(6))
def test_neighbours(executor: TorchExecutor, sequence: list[int], alone: torch.Tensor, seed: int) -> None:
    rng = random.Random(200 + seed)
    segments, expected, handles = [], [], []
    for _ in range(rng.randrange(2, 7)):
        length = rng.randrange(0, 250)
        seq = prefill(executor, sequence[:length])
        path = sequence[length : length + rng.randrange(1, 6)]
        segment, rows = grow_tree(rng, path, rng.choice([0, 0, 5]), VOCABULARY)
        segments.append(Segment(seq, segment.tokens, segment.parents, rows))
        expected.append(alone[length : length + len(path)])
        handles.append(seq)
    assert_same(executor.forward(segments).logits, torch.cat(expected))
    for seq in handles:
        executor.close(seq)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["smollm2", "qwen2.5-1.5b"])
def test_where_blocks_of_long_sums_meet(shape: str, dtype: str) -> None:
    """Big trees across the edges of our blocks (128 and 768 terms), and past the 1,024 at which oneDNN splits sums."""
    executor = TorchExecutor(random_model(max_position=2048, **SHAPES[shape]), dtype=dtype, kv_tokens=4096)
    sequence = tokens(random.Random(5), 1100, VOCABULARY)
    expected = logits_in_chunks(executor, sequence, 300)
    for length in (121, 126, 128, 762, 767, 1015, 1023, 1060):
        seq = prefill(executor, sequence[:length], chunk=128)
        segment, rows = grow_tree(random.Random(length), sequence[length : length + 8], 40, VOCABULARY)
        assert_same(executor.forward([on(seq, segment)]).logits[rows], expected[length : length + 8])
        executor.commit(seq, rows[:2])
        one = executor.forward([Segment.chain(seq, [sequence[length + 2]])]).logits
        assert_same(one[0], expected[length + 2])
        executor.close(seq)


def test_a_wrong_token_is_seen(executor: TorchExecutor, sequence: list[int], alone: torch.Tensor) -> None:
    changed = [*sequence[:59], (sequence[59] + 1) % VOCABULARY]
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_same(logits_in_chunks(executor, changed, 60)[-1:], alone[59:60])


@pytest.mark.skipif(not OBSERVED, reason="bits are not held on this CPU")
def test_one_bit_is_seen() -> None:
    logits = torch.ones(3)
    with pytest.raises(pytest.fail.Exception, match=r"bits differ, by up to 1\.19e-07"):
        assert_same(logits.nextafter(torch.tensor(2.0)), logits)
