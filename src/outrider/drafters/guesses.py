"""What a learned drafter says may come next at a number of nodes: its best candidates, in the target's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.core.errors import NonFiniteLogitsError
from outrider.core.transform import Row

if TYPE_CHECKING:
    import torch

TopK = Callable[["torch.Tensor", int], tuple["torch.Tensor", "torch.Tensor"]]
"""`Executor.top_k`."""

CANDIDATES = 48
"""Columns of a row of logits that the sampling transform is applied to, best first."""


@dataclass(frozen=True)
class Guesses:
    """ids: [R, C] int64, the target's ids of the best candidates at R nodes, best first.

    logits, logprobs: [R, C] float32, of the candidates; log-probabilities over all columns. all_logits: [R, D].
    columns: [D], the target's id of each column; None where they are the same.
    """

    ids: npt.NDArray[np.int64]
    logits: Row
    logprobs: Row
    all_logits: Row
    columns: npt.NDArray[np.int64] | None

    @classmethod
    def of(cls, logits: torch.Tensor, columns: npt.NDArray[np.int64] | None, top_k: TopK, candidates: int) -> Guesses:
        """From rows of logits [R, D] on the CPU, of which the ``candidates`` best columns are taken."""
        found, logprobs = top_k(logits, min(candidates, logits.shape[1]))
        places: npt.NDArray[np.int64] = found.numpy()
        rows: Row = logits.numpy()
        best = rows[np.arange(len(rows))[:, None], places]
        return cls(places if columns is None else columns[places], best, logprobs.numpy(), rows, columns)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> Guesses:
        """Those of a range of nodes."""
        return Guesses(self.ids[rows], self.logits[rows], self.logprobs[rows], self.all_logits[rows], self.columns)

    def check(self) -> None:
        """Raise NonFiniteLogitsError if a row cannot be used."""
        if not np.isfinite(self.logprobs[:, 0]).all():
            raise NonFiniteLogitsError("the learned drafter returned NaN or infinite logits")

    def full_logits(self, row: int, vocab_size: int) -> torch.Tensor:
        """Logits [vocab_size] of one row, -inf for tokens that the drafter has no column for."""
        import torch

        if self.columns is None:
            return torch.from_numpy(self.all_logits[row])
        full = np.full(vocab_size, -np.inf, dtype=np.float32)
        full[self.columns] = self.all_logits[row]
        return torch.from_numpy(full)
