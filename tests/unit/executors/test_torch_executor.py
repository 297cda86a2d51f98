"""What a torch executor refuses, in what words, and that it refuses before anything has changed; what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.errors import ConfigError, ContextLengthError, KVCacheFullError, ModelFileError, UsageError
from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from tests.support.models import random_model

MODEL = random_model("llama")


def executor_of(**options: Any) -> TorchExecutor:
    return TorchExecutor(MODEL, **{"dtype": "float32", "kv_tokens": 64} | options)


@pytest.fixture
def executor() -> TorchExecutor:
    """Sequence 0 has two committed tokens and three pending rows; sequence 1 is empty."""
    executor = executor_of(max_context=20)
    executor.open()
    executor.open()
    executor.forward([Segment.chain(0, [1, 2])])
    executor.commit(0, [0, 1])
    executor.forward([Segment(0, [3, 4, 5], [-1, 0, 0])])
    return executor


BAD_SEGMENTS = {
    "no segments": ([], "at least one segment"),
    "no rows": ([Segment(0, [], [])], "0 tokens and 0 parents"),
    "parents missing": ([Segment(0, [1, 2], [-1])], "2 tokens and 1 parents"),
    "one sequence twice": ([Segment(1, [1], [-1]), Segment(1, [1], [-1])], "at most one segment a sequence"),
    "a closed sequence": ([Segment(9, [1], [-1])], "sequence 9 is not open"),
    "a negative token": ([Segment(1, [-1], [-1])], "outside the vocabulary of 128"),
    "a token too large": ([Segment(1, [5, 128], [-1, 0])], "outside the vocabulary of 128"),
    "a parent that follows": ([Segment(1, [1, 2], [1, -1])], "row 0 has parent 1"),
    "its own parent": ([Segment(0, [1], [3])], "row 3 has parent 3"),
    "a parent below -1": ([Segment(0, [1], [-2])], "row 3 has parent -2"),
    "logits out of order": ([Segment(1, [1, 2], [-1, 0], [1, 0])], "ascending and below 2"),
    "logits of no row": ([Segment(1, [1, 2], [-1, 0], [0, 2])], "ascending and below 2"),
    "logits before the first": ([Segment(1, [1, 2], [-1, 0], [-1])], "ascending and below 2"),
}


@pytest.mark.parametrize("name", BAD_SEGMENTS)
def test_bad_segments(executor: TorchExecutor, name: str) -> None:
    segments, message = BAD_SEGMENTS[name]
    with pytest.raises(UsageError, match=message):
        executor.forward(segments)
    assert_untouched(executor)


def assert_untouched(executor: TorchExecutor) -> None:
    executor.check_integrity()
    assert (executor.length(0), executor.pending(0), executor.length(1), executor.pending(1)) == (2, 3, 0, 0)
    assert executor.free_tokens == 48


def test_a_bad_segment_after_a_good_one_changes_nothing(executor: TorchExecutor) -> None:
    with pytest.raises(UsageError):
        executor.forward([Segment(0, [1], [-1]), Segment(1, [500], [-1])])
    assert_untouched(executor)


def test_hidden_layers_that_do_not_exist(executor: TorchExecutor) -> None:
    with pytest.raises(UsageError, match="hidden layer 4 does not exist; the model has layers 0 to 3"):
        executor.forward([Segment(1, [1], [-1])], hidden_layers=[0, 4])
    assert_untouched(executor)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([3], "has 3 pending rows"), ([-1], "has 3 pending rows"), ([1], "parent of row 1 is 0"), ([0, 1, 2], "is 0")],
)
def test_bad_commits(executor: TorchExecutor, rows: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        executor.commit(0, rows)
    assert_untouched(executor)


@pytest.mark.parametrize("length", [-1, 3])
def test_bad_truncations(executor: TorchExecutor, length: int) -> None:
    with pytest.raises(UsageError, match=f"cannot truncate sequence 0 to {length} tokens: it has 2"):
        executor.truncate(0, length)
    assert_untouched(executor)


def test_the_context_counts_depth_not_rows(executor: TorchExecutor) -> None:
    siblings = Segment(0, [6] * 25, [-1] * 25)
    assert executor.forward([siblings]).logits.shape == (25, 128)
    executor.commit(0, [])
    executor.forward([Segment.chain(0, [6] * 18)])
    with pytest.raises(ContextLengthError, match="sequence 0 would reach 21 tokens, and the context is 20"):
        executor.forward([Segment(0, [6], [17])])
    assert executor.pending(0) == 18


def test_a_full_cache_is_not_fatal(executor: TorchExecutor) -> None:
    wide = Segment(1, [7] * 49, [-1] * 49)
    with pytest.raises(KVCacheFullError):
        executor.forward([Segment(0, [1], [-1]), wide])
    assert_untouched(executor)
    executor.close(0)
    assert executor.forward([wide]).logits.shape == (49, 128)
    executor.close(1)
    assert executor.free_tokens == executor.total_tokens == 64


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_a_forward_pass_that_fails_leaves_no_rows(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    expected = executor.forward([Segment(0, [6], [1])]).logits
    executor.commit(0, [])
    executor.forward([Segment(0, [3, 4, 5], [-1, 0, 0])])

    def fail(*_: object) -> None:
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(executor._model, "forward", fail)
        with pytest.raises(interruption):
            executor.forward([Segment(0, [1] * 20, [0] * 20), Segment(1, [1], [-1])])
    assert_untouched(executor)
    assert torch.equal(executor.forward([Segment(0, [6], [1])]).logits, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tokens": 0}, "kv_tokens=0 must be at least 1"),
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"max_context": 0}, "max_context=0 must be at least 1"),
        ({"max_context": 513}, "max_context=513 is more than the model's 512 positions"),
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"quantization": "int8"}, "does not quantise"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        executor_of(**options)


def test_missing_weights() -> None:
    tensors = {name: MODEL.weights.tensor(name, torch.float32) for name in MODEL.weights.names()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        TorchExecutor(Model("broken", MODEL.config, TensorWeights(tensors)), kv_tokens=16)


def test_sizes() -> None:
    executor = executor_of(kv_tokens=50, page_size=16)
    assert (executor.total_tokens, executor.free_tokens, executor.page_size) == (64, 64, 16)
    assert executor.max_context == 64, "no sequence can be longer than the cache"
    assert executor_of(kv_tokens=4096).max_context == 512, "nor than the model's positions"
    assert executor_of(max_context=30).max_context == 30


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_outputs_are_ordinary_tensors(dtype: str) -> None:
    """They may be changed in place, and a head may be trained on them."""
    executor = executor_of(dtype=dtype)
    output = executor.forward([Segment.chain(executor.open(), [1, 2, 3])], hidden_layers=[0, 3])
    assert output.logits.dtype == torch.float32
    output.logits.add_(1)
    for hidden in output.hidden.values():
        assert hidden.dtype == executor.dtype
        head = torch.ones(64, dtype=hidden.dtype, requires_grad=True)
        (hidden @ head).sum().backward()
        assert head.grad is not None
