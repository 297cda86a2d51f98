"""Sampling by the Gumbel-max trick, with noise computed only for tokens that can still win.

argmax over v of log p(v) + G(v) is a sample from p, and the k largest, in order, are k samples without replacement
(Kool, van Hoof, Welling: "Stochastic beams and where to find them", ICML 2019). The target under ``coupled`` and every
drafter that samples draw with these functions, so that the same noise gives the same token wherever it can.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.core.errors import NonFiniteLogitsError
from outrider.core.noise import GUMBEL_MAX, Stream, gumbel

if TYPE_CHECKING:
    import torch

_FIRST_CUTS = (6.0, 12.0, math.inf)
"""Nats below the most likely token that are looked at first, up to the one that holds enough tokens: usually a few
hundred, from which it then follows how far down the others can still win."""
_LOWEST = float(np.finfo(np.float32).min)


def gumbel_top_k(logprobs: torch.Tensor, k: int, seed: int, position: int, stream: int = Stream.TARGET) -> list[int]:
    """The ``k`` tokens with the highest log p + G, best first: k draws from p without replacement.

    logprobs: [V] float32 on the CPU, not necessarily normalised; -inf for tokens ruled out, which are never drawn.
    seed, position, stream: key of the noise, as in `noise.gumbel`. Equal scores go to the lower token id.
    Returns fewer than k tokens if fewer are possible. Raises NonFiniteLogitsError if ``logprobs`` holds NaN or +inf.
    """
    return _top_k(_as_row(logprobs), k, seed, position, stream)


def gumbel_argmax(logprobs: torch.Tensor, seed: int, position: int, stream: int = Stream.TARGET) -> int:
    """One draw from p: the token with the highest log p + G. Arguments and errors as in `gumbel_top_k`.

    Also raises NonFiniteLogitsError if every token is ruled out.
    """
    best = _top_k(_as_row(logprobs), 1, seed, position, stream)
    if not best:
        raise NonFiniteLogitsError("every token is ruled out; nothing is left to draw from")
    return best[0]


def _as_row(logprobs: torch.Tensor) -> npt.NDArray[np.float32]:
    row: npt.NDArray[np.float32] = logprobs.detach().numpy()
    return row


def _top_k(row: npt.NDArray[np.float32], k: int, seed: int, position: int, stream: int) -> list[int]:
    with np.errstate(invalid="ignore"):
        top = float(row.max())
    if math.isnan(top) or top == math.inf:
        raise NonFiniteLogitsError("cannot draw from log-probabilities that hold NaN or +inf")
    if top == -math.inf or k < 1:
        return []
    for nats in _FIRST_CUTS:
        first = top - nats
        ids, scores = _scored(row, first, seed, position, stream)
        if len(ids) >= k:
            break
    cut = _cut_off(scores, k)
    if cut < first:
        ids, scores = _scored(row, cut, seed, position, stream)
    if k == 1:
        return [int(ids[scores.argmax()])]
    best = np.flatnonzero(scores >= _kth_best(scores, k))
    order = best[np.lexsort((ids[best], -scores[best]))][:k]
    return [int(token) for token in ids[order]]


def _scored(
    row: npt.NDArray[np.float32], cut: float, seed: int, position: int, stream: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids, ascending, and scores (log p + G) of the tokens with log p >= cut; -inf is never among them."""
    ids = np.flatnonzero(row >= np.float32(max(cut, _LOWEST)))
    return ids, row[ids].astype(np.float64) + gumbel(seed, position, ids, stream)


def _kth_best(scores: npt.NDArray[np.float64], k: int) -> float:
    if len(scores) < k:
        return -math.inf
    return float(scores.max() if k == 1 else np.partition(scores, len(scores) - k)[len(scores) - k])


def _cut_off(scores: npt.NDArray[np.float64], k: int) -> float:
    """A log p below which no token can be among the k best, given the scores of some."""
    cut = _kth_best(scores, k) - GUMBEL_MAX
    # The margin exceeds the rounding of the comparison in float32, so that even a tie is never pruned.
    return cut - 1e-3 - 1e-6 * abs(cut)
