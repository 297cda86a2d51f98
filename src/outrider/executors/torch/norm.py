"""Root-mean-square normalisation."""

from __future__ import annotations

import torch


class Norm:
    """RMSNorm (Zhang and Sennrich, 2019) over the last axis: x / sqrt(mean(x^2) + eps) * weight.

    Computed in float32, returned in the dtype of x.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float()
        self._eps = torch.tensor(eps, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x32 * scale).mul_(self._weight).to(x.dtype)


def keep(x: torch.Tensor) -> torch.Tensor:
    """What stands where a model has no norm."""
    return x
