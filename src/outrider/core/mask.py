"""A constraint on the output that is looked at token by token: part of the sampling transform."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenMask(ABC):
    """Which tokens may not come next in one request, as a function of what was committed and of a node's path.

    Asking about a path leaves no trace: only `commit` moves the state on.
    """

    @abstractmethod
    def forbidden(self, path: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """[V], true where a token may not follow the committed tokens and ``path``; None: nothing is ruled out.

        It is None too after a path that is itself not allowed, or over: no request ever gets there, yet a rule that
        reads every node of a draft must find a distribution.
        """

    @abstractmethod
    def commit(self, token: int) -> None:
        """One token was emitted."""
