"""The native executor's contract: bookkeeping, refusals, logits and hidden states asked for."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from outrider.core.errors import ConfigError, ContextLengthError, KVCacheFullError, UnknownNameError, UsageError
from outrider.executors.base import COMMITTED, Segment
from tests.support.models import random_model
from tests.support.native import available_isas, formatted_model

if not available_isas():
    pytest.skip("the native extension is not built", allow_module_level=True)

from outrider import LLM
from outrider.engine.runtime import _OpenAlike
from outrider.executors.native.executor import NativeExecutor


def build(**options: Any) -> NativeExecutor:
    return NativeExecutor(random_model("llama", num_layers=2), **({"kv_tokens": 256} | options))


@pytest.fixture
def executor() -> NativeExecutor:
    return build()


def test_sizes(executor: NativeExecutor) -> None:
    assert (executor.page_size, executor.total_tokens, executor.free_tokens) == (16, 256, 256)
    assert executor.max_context == 256
    assert build(kv_tokens=100, max_context=40).max_context == 40
    assert build(kv_tokens=100, page_size=32).total_tokens == 128
    assert executor.weight_bytes > 0


def test_what_quantisation_cost_is_told_in_one_line(
    executor: NativeExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert executor.quantization_error is None
    int8, int4 = (build(quantization=kind).quantization_error for kind in ("int8", "int4"))
    assert int8 is not None
    assert int4 is not None
    assert 0 < int8.relative <= int8.worst < 0.01 < int4.relative <= int4.worst < 0.2
    with caplog.at_level(logging.INFO):
        llm = LLM(random_model("llama", num_layers=2), "none", executor="native", quantization="int4")
    assert llm.quantization_error == int4
    (line,) = [record.getMessage() for record in caplog.records if record.name == "outrider.engine.llm"]
    assert line.endswith(
        f"quantised to int4: relative error {int4.relative:.3g} (root mean square), "
        f"worst tensor {int4.worst_tensor} with {int4.worst:.3g}"
    )


def test_a_quantised_draft_model_stays_as_it_is() -> None:
    """The option is for float weights: asked of a float target, it must not make a quantised draft impossible."""
    target = random_model("llama", num_layers=2)
    draft, _ = formatted_model("llama", "Q8_0")
    runtime = LLM(target, "none", executor="native", quantization="int4")._runtime
    opened = _OpenAlike(runtime)(draft)
    assert opened.quantization_error is None
    assert _OpenAlike(runtime)(target).quantization_error is not None
    with pytest.raises(ConfigError, match="for float weights"):
        runtime.open_executor(draft)


def test_prefix_and_pending_rows(executor: NativeExecutor) -> None:
    seq = executor.open()
    executor.forward([Segment.chain(seq, range(20))])
    assert (executor.length(seq), executor.pending(seq), executor.free_tokens) == (0, 20, 224)
    executor.commit(seq, range(18))
    assert (executor.length(seq), executor.pending(seq)) == (18, 0)
    executor.forward([Segment(seq, [1, 2, 3], [COMMITTED, 0, 0])])
    executor.forward([Segment(seq, [4], [2])])
    executor.commit(seq, [0, 2, 3])
    assert executor.length(seq) == 21
    executor.truncate(seq, 3)
    assert (executor.length(seq), executor.free_tokens) == (3, 240)
    executor.check_integrity()
    executor.close(seq)
    assert executor.free_tokens == 256
    with pytest.raises(UsageError, match="not open"):
        executor.length(seq)


def test_logits_of_the_rows_asked_for(executor: NativeExecutor) -> None:
    first, second = executor.open(), executor.open()
    every = executor.forward([Segment.chain(first, [1, 2, 3, 4]), Segment.chain(second, [5, 6])]).logits.clone()
    executor.commit(first, ())
    executor.commit(second, ())
    some = executor.forward([Segment.chain(first, [1, 2, 3, 4], [1, 3]), Segment.chain(second, [5, 6], [0])]).logits
    assert every.shape == (6, 128)
    assert torch.equal(some, every[[1, 3, 4]])
    executor.commit(first, ())
    executor.commit(second, ())
    none = executor.forward([Segment.chain(first, [1, 2], []), Segment.chain(second, [5], [])])
    assert none.logits.shape == (0, 128)


def test_hidden_states_feed_one_another(executor: NativeExecutor) -> None:
    seq = executor.open()
    output = executor.forward([Segment.chain(seq, [1, 2, 3])], hidden_layers=[0, 2])
    assert set(output.hidden) == {0, 2}
    weights = random_model("llama", num_layers=2).weights
    table = weights.tensor("model.embed_tokens.weight", torch.bfloat16).float()
    assert torch.equal(output.hidden[0], table[[1, 2, 3]])
    last = output.hidden[2]
    norm = weights.tensor("model.norm.weight", torch.float32)
    head = weights.tensor("lm_head.weight", torch.bfloat16).float()
    logits = torch.nn.functional.rms_norm(last, last.shape[-1:], norm, 1e-5).bfloat16().float() @ head.T
    assert torch.allclose(output.logits, logits, atol=1e-5)


def test_logits_live_on_while_somebody_holds_them(executor: NativeExecutor) -> None:
    seq = executor.open()
    kept, copies = [], []
    for token in range(12):
        row = executor.forward([Segment.chain(seq, [token])]).logits[0]
        executor.commit(seq, [0])
        kept.append(row)
        copies.append(row.clone())
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_memory_of_logits_is_used_again(executor: NativeExecutor) -> None:
    seq = executor.open()
    places = set()
    for _ in range(10):
        places.add(executor.forward([Segment.chain(seq, [1, 2])]).logits.data_ptr())
        executor.commit(seq, ())
    assert len(places) == 1


@pytest.mark.parametrize(
    ("segments", "error", "message"),
    [
        ([], UsageError, "at least one segment"),
        ([Segment(0, [], [])], UsageError, "at least one row"),
        ([Segment(0, [128], [-1])], UsageError, "outside the vocabulary"),
        ([Segment(0, [-1], [-1])], UsageError, "outside the vocabulary"),
        ([Segment(0, [1, 2], [-1])], UsageError, "a token and a parent"),
        ([Segment(0, [1], [0])], UsageError, "parents come before"),
        ([Segment(0, [1], [-1], [1])], UsageError, "must be below 1"),
        ([Segment(0, [1, 2], [-1, 0], [1, 0])], UsageError, "ascending"),
        ([Segment(0, [1], [-1]), Segment(0, [1], [-1])], UsageError, "named twice"),
        ([Segment(7, [1], [-1])], UsageError, "not open"),
        ([Segment.chain(0, [1] * 101)], ContextLengthError, "context of 100"),
        ([Segment(0, [1] * 300, [-1] * 300)], KVCacheFullError, "free pages"),
    ],
)
def test_refusals_change_nothing(segments: list[Segment], error: type[Exception], message: str) -> None:
    executor = build(max_context=100)
    seq = executor.open()
    assert seq == 0
    with pytest.raises(error, match=message):
        executor.forward(segments)
    assert (executor.length(seq), executor.pending(seq), executor.free_tokens) == (0, 0, 256)
    executor.check_integrity()


def test_a_hidden_layer_that_does_not_exist_is_refused(executor: NativeExecutor) -> None:
    seq = executor.open()
    with pytest.raises(UsageError, match="no hidden states after 3 layers"):
        executor.forward([Segment.chain(seq, [1])], hidden_layers=[3])
    assert executor.pending(seq) == 0


@pytest.mark.parametrize("rows", [[1], [0, 2], [3], [0, 0]])
def test_what_is_committed_is_a_path(executor: NativeExecutor, rows: list[int]) -> None:
    seq = executor.open()
    executor.forward([Segment(seq, [1, 2, 3], [COMMITTED, 0, 1])])
    with pytest.raises(UsageError):
        executor.commit(seq, rows)
    assert executor.pending(seq) == 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"device": "cuda"}, ConfigError),
        ({"dtype": "float32"}, ConfigError),
        ({"kv_dtype": "int8"}, UnknownNameError),
        ({"quantization": "int3"}, UnknownNameError),
        ({"kv_tokens": 0}, ConfigError),
        ({"threads": 0}, ConfigError),
        ({"max_context": 1000}, ConfigError),
        ({"page_size": 24}, UsageError),
        ({"isa": "sse9"}, UsageError),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        build(**options)


def test_random_rounds_keep_the_books() -> None:
    choose = random.Random(5)
    executor = build(kv_tokens=320)
    lengths = {executor.open(): 0 for _ in range(3)}
    for _ in range(60):
        segments = []
        for seq in choose.sample(sorted(lengths), choose.randint(1, 3)):
            rows = choose.randint(1, 24)
            parents = [choose.randint(-1, row - 1) for row in range(rows)]
            segments.append(Segment(seq, choose.choices(range(128), k=rows), parents, [0]))
        try:
            executor.forward(segments)
        except KVCacheFullError:
            seq = max(lengths, key=lambda s: lengths[s])
            lengths[seq] //= 2
            executor.truncate(seq, lengths[seq])
            continue
        for segment in segments:
            path, row = [], choose.randrange(len(segment.tokens))
            while row != COMMITTED:
                path.append(row)
                row = segment.parents[row]
            executor.commit(segment.seq, path[::-1])
            lengths[segment.seq] += len(path)
        executor.check_integrity()
        assert {seq: executor.length(seq) for seq in lengths} == lengths


def test_shared_pages_give_the_bits_of_a_sequence_of_ones_own(executor: NativeExecutor) -> None:
    """Over a prefix that another sequence wrote, in other chunks: logits are equal to the bit."""
    text = [(7 * i) % 100 for i in range(45)]
    alone = executor.open()
    expected = executor.forward([Segment.chain(alone, text, [44])]).logits
    executor.close(alone)
    writer = executor.open()
    for start in range(0, 45, 9):
        executor.forward([Segment.chain(writer, text[start : start + 9], [])])
        executor.commit(writer, range(9))
    pages = executor.full_pages(writer)
    executor.retain(pages)
    executor.close(writer)
    reader = executor.open(pages)
    assert executor.length(reader) == 32
    assert torch.equal(executor.forward([Segment.chain(reader, text[32:], [12])]).logits, expected)
    executor.check_integrity()
    executor.commit(reader, range(13))
    with pytest.raises(UsageError, match="share"):
        executor.truncate(reader, 20)
    executor.close(reader)
    executor.release(pages)
    assert executor.free_tokens == executor.total_tokens
    with pytest.raises(UsageError, match="not a full page"):
        executor.open(pages)


def test_memory_sets_the_size_and_is_not_exceeded() -> None:
    page = build(kv_memory=1 << 20, kv_tokens=None).total_tokens
    assert build(kv_memory=(1 << 20) // 2, kv_tokens=None).total_tokens == page // 2
    assert build(kv_memory=1 << 20, kv_tokens=64).total_tokens == 64
    with pytest.raises(ConfigError, match="does not hold one page"):
        build(kv_memory=100, kv_tokens=None)


@pytest.mark.parametrize(("name", "chosen"), [("portable", "native"), ("foo", "unknown instruction set 'foo'")])
def test_an_instruction_set_that_is_asked_for_is_not_passed_over(name: str, chosen: str) -> None:
    """In a process of its own: the choice is made once for each."""
    code = """
from outrider.core.errors import ConfigError
from outrider.executors import choose_executor
try:
    print(choose_executor("auto", dtype="auto", device="cpu"))
except ConfigError as error:
    print(error)
"""
    env = {**os.environ, "OUTRIDER_ISA": name}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert chosen in found.stdout
