"""A row's logits and KV are the same to the last bit, whatever else is computed with it.

The reference is plain decoding on one thread: every token alone in its forward pass. Everything else (chunks of a
prompt, chains and trees of drafts, batches, threads, recomputation) has to reproduce it exactly. Equality is of bits:
a NaN is a failure.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.executors.base import COMMITTED, Segment
from tests.support.models import VARIANTS
from tests.support.native import FORMATS, available_isas, formatted_model

ISAS = available_isas()
if not ISAS:
    pytest.skip("the native extension is not built", allow_module_level=True)

from outrider.executors.native.executor import NativeExecutor  # noqa: E402

LENGTH = 90  # more than one block of 64 keys, and not a multiple of a tile
ROWS = (2, 3, 7, 16, 17, 33, 64)
CASES = [
    pytest.param(variant, format, isa, id=f"{variant}-{format}-{isa}")
    for isa in ISAS
    for variant in VARIANTS
    for format in FORMATS
    if format in ("bf16", "int8", "int4") or variant == "llama"
]


@functools.cache
def executor(variant: str, format: str, isa: str, threads: int = 1, kv_dtype: str = "bfloat16") -> NativeExecutor:
    model, quantization = formatted_model(variant, format)
    return NativeExecutor(model, kv_tokens=1024, threads=threads, quantization=quantization, kv_dtype=kv_dtype, isa=isa)


@functools.cache
def tokens(variant: str) -> tuple[int, ...]:
    return tuple(random.Random(variant).choices(range(128), k=LENGTH))


class Run:
    """A sequence's logits by position, and its KV: by layer, keys and values in the order of positions."""

    def __init__(self, target: NativeExecutor) -> None:
        self.target = target
        self.seq = target.open()
        self.logits: dict[int, torch.Tensor] = {}

    def keep(self, rows: torch.Tensor, start: int) -> None:
        for i, row in enumerate(rows):
            self.logits[start + i] = row.clone()

    def chain(self, text: Sequence[int], count: int) -> None:
        """Forward and commit the next ``count`` tokens of the text in one pass."""
        start = self.target.length(self.seq)
        output = self.target.forward([Segment.chain(self.seq, text[start : start + count])])
        self.keep(output.logits, start)
        self.target.commit(self.seq, range(count))

    def kv(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [self.target.read_kv(self.seq, layer) for layer in range(self.target.config.num_layers)]


def differences(reference: Run, other: Run) -> int:
    """How many positions have different logits or KV; a NaN anywhere is a difference."""
    wrong = {
        position
        for position, row in other.logits.items()
        if not torch.equal(row, reference.logits[position]) or not bool(row.isfinite().all())
    }
    for (keys, values), (expected_keys, expected_values) in zip(other.kv(), reference.kv(), strict=True):
        for have, want in ((keys, expected_keys), (values, expected_values)):
            wrong |= set(np.flatnonzero((have != want[: len(have)]).any(axis=1)).tolist())
    return len(wrong)


@functools.cache
def alone(variant: str, format: str, isa: str, kv_dtype: str = "bfloat16") -> Run:
    run = Run(executor(variant, format, isa, kv_dtype=kv_dtype))
    for _ in range(LENGTH):
        run.chain(tokens(variant), 1)
    return run


def check(reference: Run, other: Run) -> None:
    other.target.check_integrity()
    assert differences(reference, other) == 0
    other.target.close(other.seq)


@pytest.mark.parametrize(("variant", "format", "isa"), CASES)
def test_among_other_rows(variant: str, format: str, isa: str) -> None:
    for threads in (1, 2):
        for rows in ROWS:
            run = Run(executor(variant, format, isa, threads))
            run.chain(tokens(variant), 11)
            run.chain(tokens(variant), rows)
            check(alone(variant, format, isa), run)


@pytest.mark.parametrize(("variant", "format", "isa"), CASES)
def test_prompt_in_chunks(variant: str, format: str, isa: str) -> None:
    choose = random.Random(f"{variant}{format}{isa}")
    for sizes in ((LENGTH,), (1, LENGTH - 1), (64, 26), (16,) * 5 + (10,), (13,) * 6 + (12,)):
        run = Run(executor(variant, format, isa, choose.choice((1, 2))))
        for size in sizes:
            run.chain(tokens(variant), size)
        check(alone(variant, format, isa), run)


def grow_tree(run: Run, text: Sequence[int], choose: random.Random, rows: int) -> tuple[list[int], int]:
    """Forward a random tree below the prefix, level by level or at once, the text's continuation hidden among decoys.

    Returns the pending rows of the text's path, and how many rows there were.
    """
    start = run.target.length(run.seq)
    path: list[int] = []
    total = 0
    while total < rows:
        size = min(choose.randint(1, rows), rows - total)
        batch: list[int] = []
        parents: list[int] = []
        true_rows: list[tuple[int, int]] = []
        for row in range(total, total + size):
            if choose.random() < 0.5 and start + len(path) < len(text):
                batch.append(text[start + len(path)])
                parents.append(path[-1] if path else COMMITTED)
                true_rows.append((row - total, start + len(path)))
                path.append(row)
            else:
                batch.append(choose.randrange(128))
                parents.append(choose.randint(COMMITTED, row - 1))
        output = run.target.forward([Segment(run.seq, batch, parents)])
        for row, position in true_rows:
            run.keep(output.logits[row : row + 1], position)
        total += size
    return path, total


@pytest.mark.parametrize(("variant", "format", "isa"), CASES)
def test_in_random_trees(variant: str, format: str, isa: str) -> None:
    choose = random.Random(f"{variant}{format}{isa}")
    text = tokens(variant)
    for rows in (3, 16, 40, 90):
        run = Run(executor(variant, format, isa, choose.choice((1, 2))))
        run.chain(text, choose.randint(1, 20))
        while run.target.length(run.seq) < LENGTH:
            path, _ = grow_tree(run, text, choose, rows)
            run.target.commit(run.seq, path)
            run.target.check_integrity()
            if not path:
                run.chain(text, 1)
        check(alone(variant, format, isa), run)


@pytest.mark.parametrize(("variant", "format", "isa"), CASES)
def test_next_to_other_sequences(variant: str, format: str, isa: str) -> None:
    choose = random.Random(f"{variant}{format}{isa}")
    text = tokens(variant)
    for threads in (1, 2):
        target = executor(variant, format, isa, threads)
        run = Run(target)
        others = [target.open() for _ in range(3)]
        while target.length(run.seq) < LENGTH:
            start = target.length(run.seq)
            mine = Segment.chain(run.seq, text[start : start + choose.randint(1, 20)])
            segments = [
                Segment.chain(seq, choose.choices(range(128), k=choose.randint(1, 9)), logits=[0]) for seq in others
            ]
            place = choose.randint(0, 3)
            output = target.forward([*segments[:place], mine, *segments[place:]])
            run.keep(output.logits[place : place + len(mine.tokens)], start)
            target.commit(run.seq, range(len(mine.tokens)))
            for segment in segments:
                target.commit(segment.seq, range(choose.randint(0, len(segment.tokens))))
        for seq in others:
            target.close(seq)
        check(alone(variant, format, isa), run)


@pytest.mark.parametrize(("variant", "format", "isa"), CASES)
def test_after_truncation_and_recomputation(variant: str, format: str, isa: str) -> None:
    run = Run(executor(variant, format, isa, 2))
    text = tokens(variant)
    run.chain(text, 50)
    run.target.forward([Segment.chain(run.seq, [1] * 30)])
    run.target.truncate(run.seq, 37)
    run.chain(text, LENGTH - 37)
    check(alone(variant, format, isa), run)


@pytest.mark.parametrize("isa", ISAS)
def test_a_pass_of_more_rows_than_go_through_the_layers_together(isa: str) -> None:
    """The native pass takes rows in chunks of its own; here two sequences lie across their boundaries."""
    text = random.Random(3).choices(range(128), k=400)
    reference = Run(executor("qwen2-window", "int8", isa))
    for _ in range(400):
        reference.chain(text, 1)
    target = executor("qwen2-window", "int8", isa, 2)
    runs = [Run(target), Run(target)]
    segments = [
        Segment.chain(run.seq, text[:count], logits)
        for run, count, logits in zip(runs, (150, 400), (range(100, 150), None), strict=True)
    ]
    output = target.forward(segments, hidden_layers=[2])
    runs[0].keep(output.logits[:50], 100)
    runs[1].keep(output.logits[50:], 0)
    assert torch.equal(output.hidden[2][:150], output.hidden[2][150:300])
    for run, count in zip(runs, (150, 400), strict=True):
        target.commit(run.seq, range(count))
        check(reference, run)
    reference.target.close(reference.seq)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", ["llama", "qwen2-window"])
def test_with_float32_kv(variant: str, isa: str) -> None:
    run = Run(executor(variant, "bf16", isa, 2, "float32"))
    run.chain(tokens(variant), 30)
    path, _ = grow_tree(run, tokens(variant), random.Random(1), 40)
    run.target.commit(run.seq, path)
    check(alone(variant, "bf16", isa, "float32"), run)


@pytest.mark.parametrize("isa", ISAS)
def test_a_difference_would_be_found(isa: str) -> None:
    """The comparison sees a KV cache of another precision, and a single token that was exchanged."""
    rounded = Run(executor("llama", "bf16", isa, kv_dtype="float32"))
    rounded.chain(tokens("llama"), LENGTH)
    assert differences(alone("llama", "bf16", isa), rounded) == LENGTH
    exchanged = Run(executor("llama", "bf16", isa))
    text = list(tokens("llama"))
    text[40] ^= 1
    exchanged.chain(text, LENGTH)
    assert differences(alone("llama", "bf16", isa), exchanged) == LENGTH - 40
    rounded.target.close(rounded.seq)
    exchanged.target.close(exchanged.seq)
