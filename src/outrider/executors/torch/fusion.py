"""How a learned drafter's rows take in a feature of the target beside their token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.executors.torch.products import Linear

Normalise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Fuse:
    """See `outrider.models.config.Fusion`.

    matrix: of "project", [2H -> H]; None: "attend".
    """

    embed_norm: Normalise
    feature_norm: Normalise
    matrix: Linear | None
    norm_before_residual: bool = False

    def __call__(self, embedded: torch.Tensor, features: torch.Tensor, norm: Normalise) -> tuple[torch.Tensor, ...]:
        """Embeddings and features, both [R, H] -> the residual stream [R, H], and what the first block's attention
        reads. norm: what the first block has before its attention.
        """
        normed = self.feature_norm(features)
        joined = torch.cat((self.embed_norm(embedded), normed), dim=-1)
        if self.matrix is None:
            return normed if self.norm_before_residual else features, joined
        x = self.matrix(joined)
        return x, norm(x)
