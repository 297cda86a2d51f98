"""A row of a learned drafter is the same to the last bit, whatever else is computed with it.

The reference is one token at a time, each with its feature, on one thread. A drafter's numbers need not be invariant
for the promise to hold; that they are makes a draft a function of the text alone, and a measured acceptance length one
that repeats.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from outrider.executors.base import COMMITTED, Segment
from tests.support.head_models import HEADS, features, head_model
from tests.support.native import available_isas, formatted_model

ISAS = available_isas()
if not ISAS:
    pytest.skip("the native extension is not built", allow_module_level=True)

from outrider.executors.native.executor import NativeExecutor  # noqa: E402

LENGTH = 80
ROWS = (1, 2, 3, 7, 16, 33)
TEXT = random.Random(4).choices(range(128), k=LENGTH)
FEATURES = features(LENGTH, 64)

every_head = pytest.mark.parametrize(("kind", "isa"), [(kind, isa) for isa in ISAS for kind in HEADS])


@functools.cache
def open_head(kind: str, isa: str, threads: int) -> NativeExecutor:
    model, quantization = formatted_model("llama", "int4", seed=5)
    target = NativeExecutor(model, kv_tokens=64, threads=threads, quantization=quantization, isa=isa)
    lacking = head_model(kind, without=["model.embed_tokens.weight"])
    return target.open_head(lacking, kv_tokens=1024, max_context=512)


@dataclass
class Run:
    """A sequence on a head: logits and last hidden state of each position of the text."""

    head: NativeExecutor
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seq = self.head.open()

    def forward(self, segment: Segment, rows: torch.Tensor, positions: dict[int, int]) -> None:
        """positions: row of the segment -> position of the text that it holds."""
        last = self.head.config.num_layers
        output = self.head.forward([segment], [last], rows)
        for row, position in positions.items():
            self.seen[position] = output.logits[row].clone(), output.hidden[last][row].clone()

    def chain(self, count: int) -> None:
        start = self.head.length(self.seq)
        segment = Segment.chain(self.seq, TEXT[start : start + count])
        self.forward(segment, FEATURES[start : start + count], {i: start + i for i in range(len(segment.tokens))})
        self.head.commit(self.seq, range(len(segment.tokens)))

    def tree(self, rows: int, choose: random.Random) -> list[int]:
        """A tree below the prefix that hides the text among decoys; returns the rows of the text."""
        start = self.head.length(self.seq)
        tokens: list[int] = []
        parents: list[int] = []
        given = features(rows, 64, seed=rows)
        path: list[int] = []
        for row in range(rows):
            position = start + len(path)
            if choose.random() < 0.4 and position < LENGTH:
                tokens.append(TEXT[position])
                parents.append(path[-1] if path else COMMITTED)
                given[row] = FEATURES[position]
                path.append(row)
            else:
                tokens.append(choose.randrange(128))
                parents.append(choose.randint(COMMITTED, row - 1))
        self.forward(Segment(self.seq, tokens, parents), given, {row: start + i for i, row in enumerate(path)})
        return path


def differences(run: Run, reference: Run) -> int:
    """Positions whose logits, hidden state, key or value are not the reference's; a NaN is a difference."""
    wrong = {
        position
        for position, outputs in run.seen.items()
        if not all(torch.equal(have, want) for have, want in zip(outputs, reference.seen[position], strict=True))
    }
    for layer in range(run.head.config.num_layers):
        pairs = zip(run.head.read_kv(run.seq, layer), reference.head.read_kv(reference.seq, layer), strict=True)
        for have, want in pairs:
            wrong |= set(np.flatnonzero((have != want[: len(have)]).any(axis=1)).tolist())
    return len(wrong)


@functools.cache
def alone(kind: str, isa: str) -> Run:
    run = Run(open_head(kind, isa, 1))
    for _ in range(LENGTH):
        run.chain(1)
    return run


def check(run: Run, kind: str, isa: str) -> None:
    run.head.check_integrity()
    assert differences(run, alone(kind, isa)) == 0
    run.head.close(run.seq)


@every_head
@pytest.mark.parametrize("threads", [1, 2])
def test_chains(kind: str, isa: str, threads: int) -> None:
    for rows in ROWS:
        run = Run(open_head(kind, isa, threads))
        run.chain(11)
        while run.head.length(run.seq) < LENGTH:
            run.chain(rows)
        check(run, kind, isa)


@every_head
@pytest.mark.parametrize("threads", [1, 2])
def test_trees(kind: str, isa: str, threads: int) -> None:
    """Some trees are dropped, and true rows take their place, as at the end of a round."""
    choose = random.Random(f"{kind}{isa}")
    for rows in ROWS:
        run = Run(open_head(kind, isa, threads))
        run.chain(10)
        while run.head.length(run.seq) < LENGTH:
            path = run.tree(rows, choose)
            if not path or choose.random() < 0.3:
                run.head.commit(run.seq, ())
                run.chain(len(path) + 1)
            else:
                run.head.commit(run.seq, path)
        check(run, kind, isa)


@every_head
def test_beside_other_sequences(kind: str, isa: str) -> None:
    head = open_head(kind, isa, 2)
    choose = random.Random(f"{kind}{isa}")
    runs = [Run(head) for _ in range(3)]
    last = head.config.num_layers
    while any(head.length(run.seq) < LENGTH for run in runs):
        open_runs = [run for run in runs if head.length(run.seq) < LENGTH]
        starts = [head.length(run.seq) for run in open_runs]
        stops = [min(LENGTH, start + choose.randint(1, 9)) for start in starts]
        parts = [range(*pair) for pair in zip(starts, stops, strict=True)]
        segments = [_segment(run.seq, part) for run, part in zip(open_runs, parts, strict=True)]
        output = head.forward(segments, [last], torch.cat([FEATURES[part.start : part.stop] for part in parts]))
        row = 0
        for run, part in zip(open_runs, parts, strict=True):
            for position in part:
                run.seen[position] = output.logits[row].clone(), output.hidden[last][row].clone()
                row += 1
            head.commit(run.seq, range(len(part)))
    for run in runs:
        check(run, kind, isa)


def _segment(seq: int, positions: Sequence[int]) -> Segment:
    return Segment.chain(seq, [TEXT[i] for i in positions])


@pytest.mark.parametrize("isa", ISAS)
def test_a_pass_of_more_rows_than_go_through_the_layers_together(isa: str) -> None:
    """The native pass takes rows in chunks of its own; a feature must stay with its row across their boundaries."""
    head = open_head("eagle3", isa, 2)
    runs = [Run(head) for _ in range(5)]
    segments = [_segment(run.seq, range(LENGTH)) for run in runs]
    output = head.forward(segments, [1], FEATURES.repeat(5, 1))
    for number, run in enumerate(runs):
        for position in range(LENGTH):
            row = number * LENGTH + position
            run.seen[position] = output.logits[row].clone(), output.hidden[1][row].clone()
        head.commit(run.seq, range(LENGTH))
        check(run, "eagle3", isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_difference_would_be_found(isa: str) -> None:
    """A single number of one feature was changed."""
    run = Run(open_head("mtp", isa, 1))
    changed = FEATURES.clone()
    changed[40, 7] *= 1.5
    run.forward(Segment.chain(run.seq, TEXT), changed, {i: i for i in range(LENGTH)})
    run.head.commit(run.seq, range(LENGTH))
    assert differences(run, alone("mtp", isa)) == LENGTH - 40
    run.head.close(run.seq)
