"""Counter-based noise: every number is a function of (seed, position, index), never of what was drawn before.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) used
as a function: the state is keyed by seed, position and stream, and the index-th output is read without the ones
before it. Because nothing is consumed, speculation cannot shift the noise that a later token sees.

Uniform numbers are the odd multiples of 2^-24: symmetric around 1/2, exact in float32, and the middles of 2^23 equal
cells, so that what is realised by comparing with them has no bias of first order. A token's probability under the
Gumbel-max trick is met to within 1.5e-8, far below what a test of any affordable size can see. It is the price of noise
with a bound, `GUMBEL_MAX`.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

_ONE, _STEP, _LAST_SHIFT, _DROPPED = (np.uint64(value) for value in (1, _GOLDEN, 31, 40))
_ROUNDS = ((np.uint64(30), np.uint64(_MIX_1)), (np.uint64(27), np.uint64(_MIX_2)))

_UNIT = 2.0**-24
GUMBEL_MAX = float(-np.log(-np.log(1 - _UNIT)))
"""The largest value `gumbel` can take, about 16.64: a candidate further than this below another cannot win."""


class Stream(IntEnum):
    """Independent noises for one request. TARGET is the one that decides its text under ``coupled``."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def fresh_stream(stream: Stream, position: int) -> int:
    """A stream of its own for the round whose first token has ``position``, independent of every other round's.

    Positions beyond the first rejection are drafted again in the next round. A rule that looked at their draft noise
    before it rejected (block verification does) must not meet the same noise there again.
    """
    return stream + len(Stream) * (1 + position)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _key(seed: int, position: int, stream: int) -> int:
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key ^ position) + _GOLDEN & _MASK)
    return _mix((key ^ stream) + _GOLDEN & _MASK)


def uniform(seed: int, position: int, index: npt.ArrayLike, stream: int = Stream.TARGET) -> npt.NDArray[np.float64]:
    """Uniform numbers strictly between 0 and 1: odd multiples of 2^-24.

    seed: 0 … 2^64-1. position: index of the token in the sequence. index: any shape of non-negative integers (token
    ids, or whatever is being numbered). Returns float64 of that shape.
    """
    z = np.atleast_1d(np.asarray(index)).astype(np.uint64)
    scratch = np.empty_like(z)
    z += _ONE
    z *= _STEP
    z += np.uint64(_key(seed, position, stream))
    for shift, factor in _ROUNDS:
        z ^= np.right_shift(z, shift, out=scratch)
        z *= factor
    z ^= np.right_shift(z, _LAST_SHIFT, out=scratch)
    z >>= _DROPPED
    z |= _ONE
    return np.multiply(z, _UNIT, out=scratch.view(np.float64)).reshape(np.shape(index))


def uniform_one(seed: int, position: int, index: int, stream: int = Stream.TARGET) -> float:
    """`uniform` for a single index, at a fraction of the cost."""
    z = _mix((_key(seed, position, stream) + (index + 1) * _GOLDEN) & _MASK)
    return (z >> 40 | 1) * _UNIT


def gumbel(seed: int, position: int, tokens: npt.ArrayLike, stream: int = Stream.TARGET) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each token id, at most GUMBEL_MAX. Shapes as in `uniform`."""
    g = uniform(seed, position, tokens, stream)
    for _ in range(2):
        np.log(g, out=g)
        np.negative(g, out=g)
    return g
