"""Products with single matrices, by the kernels of the forward pass."""

from __future__ import annotations

import numpy as np
import torch

from outrider import _native
from outrider.executors.base import check_rows


class NativeDense:
    """`outrider.executors.base.Dense`: ``weight`` [n, k] in int8, groups of 32, on a session's threads.

    Raises UsageError for a k that is no multiple of 32, or a weight that is not finite.
    """

    def __init__(self, session: _native.Session, pool: _native.ThreadPool, weight: torch.Tensor) -> None:
        self._session = session
        self._n, self._k = weight.shape
        data = weight.to("cpu", torch.float32).contiguous().numpy().reshape(-1).view(np.uint8)
        self._matrix, _ = _native.quantize(
            _native.WeightFormat.int8, _native.FloatType.f32, data, self._n, self._k, pool
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        check_rows(x, self._k)
        y = torch.empty(len(x), self._n)
        self._session.multiply(self._matrix, x.contiguous().numpy(), y.numpy())
        return y
