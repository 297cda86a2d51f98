"""The generator: fixed for ever, the right law, and no dependence anywhere.

Statistical tests here have fixed seeds; with other seeds each would raise a false alarm less than once in 10^9 runs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from outrider.core import noise
from outrider.core.noise import GUMBEL_MAX, Stream, fresh_stream, gumbel, uniform, uniform_one

RARE = 1e-10
SIGMAS = stats.norm.isf(RARE / 2)


def test_the_generator_is_splitmix64(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first outputs of the authors' reference implementation for the state 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    monkeypatch.setattr(noise, "_key", lambda *key: 1234567)
    expected = [(z >> 40 | 1) / 2**24 for z in published]
    assert uniform(0, 0, range(4)).tolist() == expected


def test_the_noise_of_a_seed_never_changes() -> None:
    # A seed that a user wrote down must give the same text after every update.
    assert (uniform(0, 0, [0, 1, 151935]) * 2**24).tolist() == [2175093, 837519, 2570673]
    assert (uniform(2**64 - 1, 4096, 7, Stream.DRAFT) * 2**24) == 16554893


def test_numbers_lie_strictly_between_0_and_1_and_gumbel_below_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uniform(1, 2, np.arange(100_000)).min() > 0
    lowest, highest = 2**-24, 1 - 2**-24
    monkeypatch.setattr(noise, "uniform", lambda *key: np.array([lowest, highest]))
    low, high = gumbel(0, 0, [0, 1])
    assert low == pytest.approx(-math.log(24 * math.log(2)))
    assert high == pytest.approx(GUMBEL_MAX, abs=1e-12)
    assert GUMBEL_MAX < 17


def test_a_rare_token_keeps_its_probability() -> None:
    """Exactly, over the whole grid: a token of probability p wins against one of 1 - p with probability p."""
    grid = (2 * np.arange(2**23) + 1) / 2**24
    for p, error in ((0.3, 1e-9), (1e-3, 1e-9), (1e-6, 1e-9), (1e-7, 1.5e-8), (1e-8, 1.5e-8)):
        # The other token's uniform must lie below this for the rare one to win; so many points of the grid do.
        below = np.exp(np.log(grid) * (1 - p) / p)
        wins = float(np.floor(below * 2**23 + 0.5).sum()) / 2**46
        assert abs(wins - p) < error, p


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)])
def test_shape_follows_the_index(shape: tuple[int, ...]) -> None:
    index = np.arange(math.prod(shape)).reshape(shape)
    assert uniform(3, 4, index).shape == shape
    assert gumbel(3, 4, index).shape == shape


def test_each_number_depends_on_its_own_index_only() -> None:
    ids = np.arange(1000)
    everything = gumbel(11, 7, ids)
    assert np.array_equal(gumbel(11, 7, ids[::-1]), everything[::-1])
    assert np.array_equal(np.array([gumbel(11, 7, i) for i in ids]), everything)


def test_one_number_alone_is_the_same_number() -> None:
    for seed, position, index in ((0, 0, 0), (2**64 - 1, 2**40, 151935), (7, 3, 2**40)):
        for stream in (*Stream, fresh_stream(Stream.DRAFT, position)):
            assert uniform_one(seed, position, index, stream) == uniform(seed, position, index, stream)


def test_uniform_is_uniform_and_gumbel_is_gumbel() -> None:
    n = 400_000
    u = uniform(5, 9, np.arange(n))
    assert stats.kstest(u, "uniform").pvalue > RARE
    assert stats.chisquare(np.bincount((u * 256).astype(int), minlength=256)).pvalue > RARE
    assert stats.kstest(gumbel(6, 9, np.arange(n)), "gumbel_r").pvalue > RARE
    grid = (u * 2**24).astype(np.int64)
    assert bool((grid % 2 == 1).all())
    for bit in range(1, 24):
        ones = int((grid >> bit & 1).sum())
        assert abs(ones - n / 2) < SIGMAS * math.sqrt(n) / 2, f"bit {bit}"


def pairs(kind: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two samples that would be alike if the noise did not separate neighbours of this kind."""
    ids = np.arange(n)
    if kind.startswith("token"):
        lag = int(kind.split()[1])
        u = uniform(1, 1, np.arange(n + lag))
        return u[:n], u[lag:]
    few = np.arange(20)
    if kind == "position":
        rows = np.array([uniform(2, t, few) for t in range(n // 20 + 1)])
        return rows[:-1].ravel(), rows[1:].ravel()
    if kind == "seed":
        rows = np.array([uniform(s, 3, few) for s in range(n // 20 + 1)])
        return rows[:-1].ravel(), rows[1:].ravel()
    if kind == "seed and position":
        rows = [(uniform(s, t, few), uniform(t, s, few)) for s in range(100) for t in range(s)]
        return np.concatenate([a for a, _ in rows]), np.concatenate([b for _, b in rows])
    if kind == "far seed":
        return uniform(1, 1, ids), uniform(1 << 63 | 1, 1, ids)
    if kind == "stream":
        return uniform(1, 1, ids, Stream.TARGET), uniform(1, 1, ids, Stream.DRAFT)
    assert kind == "round"
    rows = np.array([uniform(1, 9, few, fresh_stream(Stream.DRAFT, t)) for t in range(n // 20 + 1)])
    return rows[:-1].ravel(), rows[1:].ravel()


KINDS = ["token 1", "token 2", "token 64", "position", "seed", "seed and position", "far seed", "stream", "round"]


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_independent(kind: str) -> None:
    a, b = pairs(kind, 100_000)
    n = len(a)
    assert abs(np.corrcoef(a, b)[0, 1]) < SIGMAS / math.sqrt(n)
    table = np.zeros((16, 16))
    np.add.at(table, ((a * 16).astype(int), (b * 16).astype(int)), 1)
    assert stats.chisquare(table.ravel()).pvalue > RARE


def test_dependence_would_be_seen() -> None:
    a, _ = pairs("token 1", 100_000)
    b = np.where(np.arange(len(a)) % 20 == 0, a, pairs("stream", 100_000)[1])
    assert abs(np.corrcoef(a, b)[0, 1]) > SIGMAS / math.sqrt(len(a))


def test_streams_of_rounds_never_meet() -> None:
    streams = [fresh_stream(stream, position) for stream in Stream for position in range(50)]
    assert len({*streams, *Stream}) == len(Stream) * 51
