"""Drawing by Gumbel-top-k: pruning changes nothing, and the draws have the law they should."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.core import gumbel as module
from outrider.core.errors import NonFiniteLogitsError
from outrider.core.gumbel import gumbel_argmax, gumbel_top_k
from outrider.core.noise import Stream, gumbel


def unpruned(logprobs: torch.Tensor, k: int, seed: int, position: int, stream: int = Stream.TARGET) -> list[int]:
    scores = logprobs.double().numpy() + gumbel(seed, position, np.arange(len(logprobs)), stream)
    order = np.lexsort((np.arange(len(scores)), -scores))
    return [int(token) for token in order[:k] if scores[token] > -math.inf]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    size=st.integers(1, 3000),
    spread=st.floats(0, 12),
    ruled_out=st.floats(0, 1),
    k=st.integers(1, 40),
    shift=st.sampled_from([0.0, -1e4, 300.0]),
)
@example(seed=0, size=3000, spread=0.0, ruled_out=0.0, k=1, shift=0.0)
def test_pruning_changes_nothing(seed: int, size: int, spread: float, ruled_out: float, k: int, shift: float) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal(size) * spread + shift
    values[random.random(size) < ruled_out] = -math.inf
    row = torch.from_numpy(values.astype(np.float32))
    assert gumbel_top_k(row, k, seed, 3, Stream.DRAFT) == unpruned(row, k, seed, 3, Stream.DRAFT)


def test_a_token_far_below_still_wins_when_its_noise_says_so() -> None:
    """The second look is needed: tokens beyond the first cut win now and then."""
    row = torch.full((4000,), -8.5)
    row[7] = 0.0
    wins = [gumbel_argmax(row, seed, 0) for seed in range(300)]
    assert wins == [unpruned(row, 1, seed, 0)[0] for seed in range(300)]
    assert sum(token != 7 for token in wins) > 30


def test_a_cut_that_is_too_high_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GUMBEL_MAX", 3.0)
    row = torch.full((4000,), -8.5)
    row[7] = 0.0
    assert any(gumbel_argmax(row, seed, 0) != unpruned(row, 1, seed, 0)[0] for seed in range(300))


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gumbel", lambda seed, position, tokens, stream: np.zeros(len(tokens)))
    row = torch.tensor([-1.0, 0.0, 0.0, -1.0, 0.0])
    assert gumbel_argmax(row, 0, 0) == 1
    assert gumbel_top_k(row, 5, 0, 0) == [1, 2, 4, 0, 3]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_rows_are_refused(broken: float) -> None:
    row = torch.tensor([0.0, broken, -1.0])
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        gumbel_top_k(row, 2, 0, 0)


def test_nothing_to_draw_from() -> None:
    nothing = torch.full((3,), -math.inf)
    assert gumbel_top_k(nothing, 2, 0, 0) == []
    with pytest.raises(NonFiniteLogitsError, match="ruled out"):
        gumbel_argmax(nothing, 0, 0)
    assert sorted(gumbel_top_k(torch.tensor([0.0, -math.inf, -2.0]), 3, 0, 0)) == [0, 2]
    assert gumbel_top_k(torch.tensor([0.0, -1.0]), 0, 0, 0) == []


def test_the_arguments_are_left_alone() -> None:
    row = torch.log_softmax(torch.arange(50.0), -1)
    before = row.clone()
    gumbel_top_k(row, 4, 1, 1)
    assert torch.equal(row, before)


def test_draws_are_samples_without_replacement() -> None:
    """20,000 ordered pairs against q(x) q(y) / (1 - q(x)); false alarm below 10^-9 with other seeds."""
    q = np.array([0.5, 0.3, 0.15, 0.05])
    row = torch.from_numpy(np.log(q).astype(np.float32))
    seen = Counter(tuple(gumbel_top_k(row, 2, seed, 5, Stream.DRAFT)) for seed in range(20_000))
    pairs = list(permutations(range(4), 2))
    expected = [20_000 * q[x] * q[y] / (1 - q[x]) for x, y in pairs]
    assert stats.chisquare([seen[pair] for pair in pairs], expected).pvalue > 1e-9
