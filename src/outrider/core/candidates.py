"""The sampling transform on a few candidates at each of several nodes: what learned drafters choose children by.

`SamplingState` turns a whole row of logits into p or q. Of a drafter's own logits no more is looked at than the best
few; what the transform makes of those, and of many nodes at once, is all that a level of a draft tree needs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.core import transform
from outrider.core.transform import Row

if TYPE_CHECKING:
    from outrider.core.history import History
    from outrider.core.mask import TokenMask
    from outrider.core.sampling import SamplingParams

Ids = npt.NDArray[np.int64]


class CandidateTransform:
    """`SamplingState`'s transform, with all tokens ruled out but the candidates. Made by it, and kept up to date by it.

    ids, logits: [R, C] int64 and float32, the candidates at R nodes, distinct within a node. paths: [R, L], the tokens
    between the last committed one and each node, which are all equally deep. Arguments are not changed. Logits must be
    free of NaN and +inf; nothing raises. A node at which no candidate is left has a row of -inf.
    """

    def __init__(
        self,
        params: SamplingParams,
        history: History,
        mask: TokenMask | None,
        vocab_size: int,
        *,
        bias: tuple[Ids, Row],
        banned: Ids,
        ends: Ids,
    ) -> None:
        """bias: token ids, and what is added to their logits. banned, ends: ascending."""
        self._params = params
        self._history = history
        self._mask = mask
        self._vocab_size = vocab_size
        order = np.argsort(bias[0])
        self._bias_ids, self._bias = bias[0][order], bias[1][order]
        self._banned = banned
        self._ends = ends
        self._penalises = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    @property
    def reads_paths(self) -> bool:
        """Whether the tokens of a path make a difference, and not just their number."""
        return self._penalises or self._mask is not None

    def adjusted(self, ids: Ids, logits: Row, paths: Ids) -> Row:
        """Logits [R, C] after bias, penalties, bans, min_tokens and mask; ``logits`` itself if nothing is to change."""
        x = logits
        if len(self._bias_ids):
            found, slot = _find(self._bias_ids, ids)
            x = np.where(found, x + self._bias[slot], x)
        if self._penalises:
            x = self._penalised(ids, x, paths)
        ruled_out = self._ruled_out(ids, paths)
        return x if ruled_out is None else np.where(ruled_out, np.float32(-math.inf), x)

    def logprobs(self, ids: Ids, logits: Row, paths: Ids) -> Row:
        """Log-probabilities [R, C] of the candidates among themselves; at temperature 0 a point mass on the best."""
        params = self._params
        x = self.adjusted(ids, logits, paths)
        top = x.max(axis=1, keepdims=True)
        if params.greedy:
            best = np.where(x == top, ids, np.iinfo(np.int64).max).argmin(axis=1)[:, None]
            chosen = (np.arange(x.shape[1]) == best) & np.isfinite(top)
            return np.where(chosen, np.float32(0), np.float32(-math.inf))
        # Where nothing is left, all stays -inf.
        x = transform.tempered(x, np.maximum(top, np.finfo(np.float32).min), params.temperature)
        floors = transform.row_thresholds(x, params.top_k, params.top_p, params.min_p)
        if floors is not None:
            x = np.where(x >= floors, x, np.float32(-math.inf))
        return transform.log_softmax_rows(x)

    def _penalised(self, ids: Ids, x: Row, paths: Ids) -> Row:
        params = self._params
        numbers = self._history.counts_of(ids, self._vocab_size)
        if paths.shape[1]:
            on_path = (ids[:, :, None] == paths[:, None, :]).sum(axis=2, dtype=np.float32)
            numbers = np.where(on_path > 0, np.maximum(numbers, 0) + on_path, numbers)
        changed = transform.penalised(
            x, numbers, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        )
        return np.where(numbers >= 0, changed, x)

    def _ruled_out(self, ids: Ids, paths: Ids) -> npt.NDArray[np.bool_] | None:
        out: npt.NDArray[np.bool_] | None = None
        if len(self._banned):
            out = _find(self._banned, ids)[0]
        if len(self._ends) and self._history.length + paths.shape[1] < self._params.min_tokens:
            ends = _find(self._ends, ids)[0]
            out = ends if out is None else out | ends
        if self._mask is not None:
            masked = np.zeros(ids.shape, dtype=np.bool_)
            for row, path in enumerate(paths.tolist()):
                forbidden = self._mask.forbidden(path)
                if forbidden is not None:
                    masked[row] = forbidden[ids[row]]
            out = masked if out is None else out | masked
        return out


def _find(table: Ids, ids: Ids) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Which of ``ids`` the ascending ``table`` holds, and where (anywhere for the others)."""
    slot = np.minimum(np.searchsorted(table, ids), len(table) - 1)
    return table[slot] == ids, slot
