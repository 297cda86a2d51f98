"""Small random rounds for the acceptance tests: a tree, the target's logits, and distributions to draw from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.acceptance.base import Candidate
from outrider.core.gumbel import gumbel_top_k
from outrider.core.noise import Stream
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.core.tree import ROOT, DraftTree

VOCAB = 5


@dataclass(frozen=True)
class Problem:
    candidate: Candidate
    drawn: bool

    @property
    def tree(self) -> DraftTree:
        return self.candidate.tree

    def target_probs(self) -> torch.Tensor:
        """[1, 1 + n, V] float64, the target's distribution at every row."""
        sampling = self.candidate.sampling
        paths = [[self.tree.tokens[i] for i in self.tree.path(node)] for node in range(ROOT, len(self.tree))]
        rows = zip(self.candidate.logits, paths, strict=True)
        return torch.stack([sampling.logprobs(row, path).double().exp() for row, path in rows]).unsqueeze(0)

    def draft_probs(self) -> torch.Tensor | None:
        """[1, n, V] float64; rows that nothing was drawn from are filled with NaN, so that reading one shows."""
        if not self.drawn:
            return None
        rows = torch.full((1, len(self.tree), VOCAB), math.nan, dtype=torch.float64)
        for node, logprobs in self.tree.logprobs.items():
            rows[0, node + 1] = logprobs.double().exp()
        return rows


def random_logits(random: np.random.Generator, rows: int, vocab: int = VOCAB) -> torch.Tensor:
    """Rows of logits in which some tokens have probability zero."""
    values = random.standard_normal((rows, vocab)) * 1.5
    values[random.random((rows, vocab)) < 0.2] = -math.inf
    values[np.arange(rows), random.integers(0, vocab, rows)] = 1.0
    return torch.from_numpy(values.astype(np.float32))


def random_tree(
    random: np.random.Generator, sampling: SamplingState, stream: int, *, drawn: bool, width: int, depth: int
) -> DraftTree:
    """Children at every node of some levels: drawn by Gumbel-top-k with their q, or just any distinct tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    logprobs: dict[int, torch.Tensor] = {}
    level: list[tuple[int, int]] = [(ROOT, 0)]
    while level:
        node, at = level.pop(0)
        if at == depth:
            continue
        q = torch.log_softmax(random_logits(random, 1)[0], -1)
        children = random.permutation(VOCAB)[:width].tolist()
        if drawn:
            children = gumbel_top_k(q, width, sampling.seed, sampling.position + at, stream)
            logprobs[node] = q
        for token in children:
            level.append((len(tokens), at + 1))
            tokens.append(token)
            parents.append(node)
    return DraftTree(tokens, parents, [0.5] * len(tokens), logprobs)


def random_problem(
    seed: int,
    *,
    drawn: bool = True,
    width: int = 1,
    depth: int = 3,
    stream: int = Stream.DRAFT,
    params: SamplingParams | None = None,
    prompt: Sequence[int] = (0, 1),
) -> Problem:
    random = np.random.default_rng(seed)
    sampling = SamplingState(params or SamplingParams(temperature=1.0, seed=seed), VOCAB, prompt)
    tree = random_tree(random, sampling, stream, drawn=drawn, width=width, depth=depth)
    return Problem(Candidate(tree, random_logits(random, 1 + len(tree)), sampling), drawn)
