"""Least squares over batches: the best that a drafter without its block can do, which is where training starts."""

from __future__ import annotations

import torch

_RIDGE = 0.003
"""Added to the mean square of every input, which is 1 then: enough for inputs that all but depend on one another."""


class Regression:
    """The matrix W [outputs, inputs] that brings x W^T nearest to y."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._squares = torch.zeros(inputs, inputs, dtype=torch.float64)
        self._products = torch.zeros(inputs, outputs, dtype=torch.float64)
        self._rows = 0

    @property
    def is_determined(self) -> bool:
        """Whether there are rows enough for the result to be more than noise."""
        return self._rows > 2 * len(self._squares)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x: [R, inputs], y: [R, outputs], float32."""
        self._squares += x.T @ x
        self._products += x.T @ y
        self._rows += len(x)

    def solve(self) -> torch.Tensor:
        """W in float32."""
        scale = (self._squares.diagonal() / max(self._rows, 1)).sqrt().clamp(min=1e-6)
        normal = self._squares / scale / scale[:, None] / max(self._rows, 1)
        normal.diagonal().add_(_RIDGE)
        found: torch.Tensor = torch.linalg.solve(normal, self._products / scale[:, None] / max(self._rows, 1))
        return (found / scale[:, None]).T.float()
