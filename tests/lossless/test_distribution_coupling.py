"""Shared noise makes draft and target agree as often as theory says: at least (1 - TV) / (1 + TV).

Bounds are seven standard errors wide: with other seeds, a false alarm less than once in 10^9 runs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.core.gumbel import gumbel_argmax, gumbel_top_k
from outrider.core.noise import Stream

DRAWS = 10_000
SIGMAS = 7


def pair(vocab: int, concentration: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.dirichlet([concentration] * vocab), random.dirichlet([concentration] * vocab)


def as_row(probs: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.log(probs).astype(np.float32))


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """Probability that both argmaxes fall on the same token, summed over tokens (Daliri et al., 2024)."""
    return float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))))


CASES = [pair(5, 1.0, 0), pair(5, 0.4, 1), pair(50, 0.5, 2), (np.array([0.6, 0.4]), np.array([0.2, 0.8]))]


@pytest.mark.parametrize(("p", "q"), CASES)
def test_draft_and_target_agree_as_often_as_they_should(p: np.ndarray, q: np.ndarray) -> None:
    tv = np.abs(p - q).sum() / 2
    bound = (1 - tv) / (1 + tv)
    exact = agreement(p, q)
    assert bound <= exact <= 1 - tv + 1e-12
    target, draft = as_row(p), as_row(q)
    same = np.mean([gumbel_argmax(target, seed, 3) == gumbel_argmax(draft, seed, 3) for seed in range(DRAWS)])
    error = SIGMAS * math.sqrt(exact * (1 - exact) / DRAWS)
    assert abs(same - exact) < error
    assert same > bound - error


def test_other_noise_agrees_less() -> None:
    p, q = CASES[1]
    target, draft = as_row(p), as_row(q)
    apart = [gumbel_argmax(target, s, 3) == gumbel_argmax(draft, s, 3, Stream.DRAFT) for s in range(DRAWS)]
    assert abs(np.mean(apart) - (p * q).sum()) < SIGMAS * 0.5 / math.sqrt(DRAWS)
    assert np.mean(apart) < agreement(p, q) - 0.1


def test_a_draft_that_is_the_target_always_agrees() -> None:
    row = as_row(CASES[2][0])
    assert all(gumbel_argmax(row, seed, 1) == gumbel_top_k(row, 4, seed, 1)[0] for seed in range(500))


def test_children_that_share_the_noise_hit_more_often_than_the_most_likely_ones() -> None:
    p, q = pair(50, 0.5, 7)
    target, draft = as_row(p), as_row(q)
    likely = set(np.argsort(-q)[:4].tolist())
    own = [gumbel_argmax(target, seed, 3) for seed in range(4000)]
    shared = np.mean([token in gumbel_top_k(draft, 4, seed, 3) for seed, token in enumerate(own)])
    assert shared > np.mean([token in likely for token in own]) + 0.1
