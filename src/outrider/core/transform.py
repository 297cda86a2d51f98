"""The arithmetic of the sampling transform: one row of float32 logits in, one row out.

NumPy, not PyTorch: a row is small enough that one core finishes it in the time it takes to wake a second one, and a
reduction that is never split over threads adds in one order, whatever the machine is doing besides.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]

_NEVER = np.float32(-math.inf)
_CUTS = (4.0, 12.0)
"""Nats below the most likely token within which the nucleus is looked for before everything is sorted."""
_COLUMNS, _COLUMNS_PER_RANK = 512, 8
_LEAST, _MOST = 2.0**-126, 2.0**127
"""Range of float32. Temperatures beyond it act like its ends: all to the most likely tokens, or to all the same."""


def penalised(values: Row, counts: Row, repetition: float, presence: float, frequency: float) -> Row:
    """Logits of tokens that were seen in prompt or output, after the penalties.

    values, counts: [S], the logit of each such token and how often the output holds it (0: in the prompt only).
    Repetition as in Keskar et al. (CTRL, 2019): divides positive and multiplies negative logits. Presence and frequency
    as OpenAI defines them: subtracted once, and once per occurrence.
    """
    if repetition != 1:
        factor = _factor(repetition)
        with np.errstate(over="ignore"):
            values = np.where(values > 0, values / factor, values * factor)
    if presence or frequency:
        values = values - (np.float32(presence) * (counts > 0) + np.float32(frequency) * counts)
    return values


def tempered(x: Row, top: float | Row, temperature: float) -> Row:
    """(x - top) / temperature; ``top`` is the largest of x, or of each row of it, so that the result is at most 0."""
    with np.errstate(over="ignore"):
        shifted: Row = x - np.float32(top)
        if temperature != 1:
            shifted /= _factor(temperature)
    return shifted


def threshold(x: Row, top_k: int, top_p: float, min_p: float) -> float:
    """The least value of x that top-k, then top-p, then min-p let through; -inf if they let all of it through.

    x: [V], logits divided by the temperature, the largest of them 0. Ties with the last token let through are let
    through too, so that the kept set never depends on the order of a sort.
    """
    floor = -math.inf
    if 0 < top_k < len(x):
        floor = _kth_largest(x, top_k)
    if top_p < 1:
        floor = max(floor, _nucleus(x, top_p, floor))
    if min_p > 0:
        floor = max(floor, math.log(min_p))
    return floor


def log_softmax(x: Row) -> Row:
    """Log-probabilities of x [V], whose largest value is about 0; -inf stays -inf."""
    result: Row = x - np.float32(math.log(float(np.exp(x).sum())))
    return result


def log_softmax_above(x: Row, floor: float) -> Row:
    """`log_softmax` of the values that are at least ``floor``, -inf for all others."""
    kept = np.flatnonzero(x >= np.float32(floor))
    result = np.full_like(x, _NEVER)
    result[kept] = log_softmax(x[kept])
    return result


def row_thresholds(x: Row, top_k: int, top_p: float, min_p: float) -> Row | None:
    """`threshold` of each row of x [R, C], as [R, 1]; None if all is let through. Meant for a few columns: it sorts."""
    if not (0 < top_k < x.shape[1] or top_p < 1 or min_p > 0):
        return None
    floors = np.full((len(x), 1), _NEVER if min_p <= 0 else math.log(min_p), dtype=np.float32)
    ordered = -np.sort(-x, axis=1)
    if 0 < top_k < x.shape[1]:
        floors = np.maximum(floors, ordered[:, top_k - 1 : top_k])
    if top_p < 1:
        allowed = ordered >= ordered[:, top_k - 1 : top_k] if 0 < top_k < x.shape[1] else True
        sums = np.where(allowed, np.exp(ordered), 0).cumsum(axis=1, dtype=np.float64)
        last = np.minimum((sums < top_p * sums[:, -1:]).sum(axis=1), x.shape[1] - 1)
        floors = np.maximum(floors, np.take_along_axis(ordered, last[:, None], axis=1))
    return floors


def log_softmax_rows(x: Row) -> Row:
    """`log_softmax` of each row of x [R, C]; a row of -inf stays one."""
    total = np.exp(x).sum(axis=1, keepdims=True)
    result: Row = x - np.log(np.where(total > 0, total, 1))
    return result


def _factor(value: float) -> np.float32:
    return np.float32(min(max(value, _LEAST), _MOST))


def _kth_largest(x: Row, k: int) -> float:
    """Exact. Of columns of x laid out as a table, the k largest column maxima are k values of x, so that what is below
    the least of them is below the k-th largest too: only the rest, a few times k values, needs a partition."""
    columns = max(_COLUMNS, _COLUMNS_PER_RANK * k)
    if len(x) > 2 * columns:
        maxima = x[: len(x) // columns * columns].reshape(-1, columns).max(axis=0)
        x = x[x >= np.partition(maxima, columns - k)[columns - k]]
    return float(np.partition(x, len(x) - k)[len(x) - k])


def _nucleus(x: Row, top_p: float, floor: float) -> float:
    """Value of the last token of the smallest set of most likely ones whose probability reaches ``top_p``.

    Probabilities are relative to the tokens that are at least ``floor``, and are summed in float64.
    """
    allowed = x if floor == -math.inf else x[x >= np.float32(floor)]
    needed = top_p * float(np.exp(allowed).sum())
    for cut in (*_CUTS, math.inf):
        head = np.sort(allowed[allowed >= np.float32(-cut)])[::-1]
        reached = int(np.searchsorted(np.exp(head.astype(np.float64)).cumsum(), needed))
        if reached < len(head):
            return float(head[reached])
    return float(allowed.min())
