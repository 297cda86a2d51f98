"""What rounds cost on this machine: the executor's measured curve, kept up to date by every round."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.executors.base import CostCurve

_FORGET = 0.1
_DRIFT = 0.1
_STRETCH = 1.5
"""A round with a prompt's chunk in it may last this many times as long as it would without: inter-token latency is
promised to stay within twice what it was, and neither the curve nor the clock is exact."""
_MARGINAL = 0.7
"""What one row more of a chunk costs, as a part of what its rows cost on average."""
_FIRST_CHUNK = 4.0
_LEAST = 1e-3
"""Part of a round's time that a chunk is taken to cost at least, where the clock says that it was free."""
_OUTLIER = 2.0
"""One pass moves an estimate as if it had taken this many times as long as expected, at most: a machine has hiccups."""


@dataclass
class _Chunk:
    """The chunks of late, on average: rows, and what a round took longer for them."""

    size: float
    seconds: float


class ForwardPrice:
    """Seconds of a forward pass by number of rows.

    Each observation moves the two measured points around it, so that a machine that gets slower, or a context that gets
    longer, is seen within some tens of rounds; and a little the whole curve with them, since what has not been seen
    for a while has most likely changed likewise.
    """

    def __init__(self, measure: Callable[[], CostCurve]) -> None:
        """measure: gives the executor's curve. Called when a price is first asked for: plain decoding of one request
        after the other never does.
        """
        self._measure = measure
        self._known = False
        self._beside = 0.0

    @cached_property
    def _points(self) -> tuple[list[int], list[float]]:
        curve = self._measure()
        self._known = True
        return list(curve.rows), list(curve.seconds)

    @cached_property
    def _chunk(self) -> _Chunk:
        x, y = self._points
        row = max((y[-1] - y[0]) / max(x[-1] - x[0], 1), _LEAST * y[0])
        return _Chunk(_FIRST_CHUNK, _FIRST_CHUNK * row)

    def at(self, rows: float) -> float:
        """Estimated seconds for ``rows`` rows, on average."""
        x, y = self._points
        if len(x) == 1:
            return y[0]
        hi = min(max(bisect_left(x, rows), 1), len(x) - 1)
        return y[hi - 1] + max(y[hi] - y[hi - 1], 0.0) * (rows - x[hi - 1]) / (x[hi] - x[hi - 1])

    def of_round(self, rows: float) -> float:
        """Estimated seconds for a round of ``rows`` rows, drafting not counted: what a token that was drafted saves."""
        return self._beside + self.at(rows)

    def rising(self, first: int, count: int) -> list[float]:
        """`of_round` of ``count`` numbers of rows, ``first`` and those that follow it."""
        x, y = self._points
        if len(x) == 1:
            return [self._beside + y[0]] * count
        prices: list[float] = []
        while len(prices) < count:
            rows = first + len(prices)
            hi = min(max(bisect_left(x, rows), 1), len(x) - 1)
            end = first + count if hi == len(x) - 1 else min(x[hi] + 1, first + count)
            rise, span = max(y[hi] - y[hi - 1], 0.0), x[hi] - x[hi - 1]
            start = self._beside + y[hi - 1]
            prices.extend(start + rise * (n - x[hi - 1]) / span for n in range(rows, end))
        return prices

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from one forward pass without a chunk. Passes far beyond the curve are left out."""
        if not self._known:
            return
        x, y = self._points
        if rows > 2 * x[-1]:
            return
        seconds = min(seconds, _OUTLIER * self.at(rows))
        drift = 1 + _DRIFT * (seconds / self.at(rows) - 1)
        y[:] = [drift * value for value in y]
        error = seconds - self.at(rows)
        hi = min(bisect_left(x, rows), len(x) - 1)
        lo = max(hi - 1, 0)
        span = x[hi] - x[lo]
        near = min(max((rows - x[lo]) / span, 0.0), 1.0) if span else 1.0
        y[hi] = max(y[hi] + _FORGET * near * error, 1e-9)
        if lo != hi:
            y[lo] = max(y[lo] + _FORGET * (1 - near) * error, 1e-9)

    def observe_beside(self, seconds: float) -> None:
        """Learn what a round took beside its forward pass and its draft: acceptance, commits, the engine's own work."""
        if self._beside:
            seconds = min(seconds, _OUTLIER * self._beside)
        self._beside += (_FORGET if self._beside else 1.0) * (seconds - self._beside)

    def chunk_beside(self, rows: int) -> int:
        """Prompt rows that may go along with ``rows`` rows of requests that decode: one at least, so that it ends.

        A step from the chunks of late towards the time that there is. Part of a chunk's time does not depend on its
        size, so that a row more costs less than the rows before it.
        """
        size, seconds = self._chunk.size, self._chunk.seconds
        spare = (_STRETCH - 1) * self.at(rows) - seconds
        step = spare * size / (_MARGINAL * seconds)
        return max(1, round(min(size + step, 4 * size)))

    def observe_chunk(self, rows: int, prompt_rows: int, seconds: float) -> None:
        """Learn what a round took in which ``prompt_rows`` rows of prompts went along with ``rows`` that decode.

        Far down a long prompt a row costs several times what it costs at the short context of the measured curve.
        """
        more = max(seconds - self.at(rows), _LEAST * self.at(rows))
        chunk = self._chunk
        more = min(more, _OUTLIER * chunk.seconds * max(prompt_rows / chunk.size, 1.0))
        chunk.size += _FORGET * (prompt_rows - chunk.size)
        chunk.seconds += _FORGET * (more - chunk.seconds)
