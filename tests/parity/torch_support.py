"""Drives a torch executor: sequences, paths and trees of random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from outrider.executors.base import COMMITTED, Segment
from outrider.executors.torch.executor import TorchExecutor


def tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def grow_tree(rng: random.Random, path: Sequence[int], extra: int, vocabulary: int) -> tuple[Segment, list[int]]:
    """A tree (for sequence 0) that holds ``path`` among ``extra`` random nodes, and the rows that hold it.

    Nodes come in random order, every parent before its children.
    """
    row_tokens: list[int] = []
    parents: list[int] = []
    rows: list[int] = []
    steps = [True] * len(path) + [False] * extra
    rng.shuffle(steps)
    for on_path in steps:
        if on_path:
            parents.append(rows[-1] if rows else COMMITTED)
            row_tokens.append(path[len(rows)])
            rows.append(len(row_tokens) - 1)
        else:
            parents.append(rng.randrange(-1, len(row_tokens)))
            row_tokens.append(rng.randrange(vocabulary))
    return Segment(0, row_tokens, parents), rows


def on(seq: int, segment: Segment) -> Segment:
    """The same segment for another sequence."""
    return Segment(seq, segment.tokens, segment.parents, segment.logits)


def path_to(segment: Segment, row: int) -> list[int]:
    """Tokens from the prefix down to a row of a segment that was forwarded with nothing pending."""
    path = []
    while row != COMMITTED:
        path.append(segment.tokens[row])
        row = segment.parents[row]
    return path[::-1]


def prefill(executor: TorchExecutor, prompt: Sequence[int], chunk: int = 1 << 30) -> int:
    """A new sequence with ``prompt`` committed, forwarded in chunks."""
    seq = executor.open()
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        executor.forward([Segment.chain(seq, part, logits=())])
        executor.commit(seq, range(len(part)))
    return seq


def logits_in_chunks(executor: TorchExecutor, sequence: Sequence[int], chunk: int) -> torch.Tensor:
    """Logits [len(sequence), V] of every token, forwarded and committed ``chunk`` at a time."""
    seq = executor.open()
    parts = []
    for start in range(0, len(sequence), chunk):
        part = sequence[start : start + chunk]
        parts.append(executor.forward([Segment.chain(seq, part)]).logits)
        executor.commit(seq, range(len(part)))
    executor.close(seq)
    return torch.cat(parts)
