"""How often the candidates of heads that guess side by side have been right: what their tree is laid out by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]

_EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
"""Bins of a head's own scores."""
_MEMORY = 0.995
_PRIOR_WEIGHT = 4.0
"""Observations that the prior is worth."""

Stated = Sequence[Sequence[float]]
"""For each head, how often its candidate of each rank was right: `Head.accept_by_rank`."""


class HeadAccuracy:
    """By kind of sampling, head, rank of the candidate and how sure the head was: a Beta posterior, whose old evidence
    fades. A candidate counts where the tokens before it were right, which is when it matters.

    What was stated about a kind of sampling beforehand is the prior; where nothing was, the head's own score is.

    Of a fixed size; deterministic; knows no tenants, so that each of them needs one.
    """

    def __init__(self, kinds: int, heads: int, ranks: int, stated: Mapping[int, Stated] | None = None) -> None:
        """stated: by kind. Of fewer ranks than ``ranks`` the others are as if nothing was stated."""
        shape = (kinds, heads, ranks, len(_EDGES) + 1)
        self._right = np.zeros(shape)
        self._seen = np.zeros(shape)
        self._stated = np.full(shape[:3], np.nan)
        for kind, of_heads in (stated or {}).items():
            for head, of_ranks in enumerate(of_heads):
                self._stated[kind, head, : len(of_ranks)] = of_ranks[:ranks]

    def chances(self, kind: int, head: int, scores: Scores) -> Scores:
        """Chances that the candidates of a head, best first, are right. scores: [n], the head's own, in [0, 1]."""
        at = self._cells(kind, head, scores)
        stated = self._stated[kind, head, : len(scores)]
        prior = np.where(np.isnan(stated), scores, stated)
        result: Scores = (self._right[at] + _PRIOR_WEIGHT * prior) / (self._seen[at] + _PRIOR_WEIGHT)
        return result

    def record(self, kind: int, head: int, scores: Scores, right: npt.NDArray[np.bool_]) -> None:
        """Learn which of the candidates was right, if any."""
        at = self._cells(kind, head, scores)
        self._right[at] = self._right[at] * _MEMORY + right
        self._seen[at] = self._seen[at] * _MEMORY + 1

    def _cells(
        self, kind: int, head: int, scores: Scores
    ) -> tuple[int, int, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        return kind, head, np.arange(len(scores)), np.searchsorted(_EDGES, scores, side="right")
