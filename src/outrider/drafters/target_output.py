"""The target's own output matrix, for heads that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.heads.head import EMBEDDING, OUTPUT

if TYPE_CHECKING:
    import torch

    from outrider.models.loader import Model


def output_rows(target: Model, ids: torch.Tensor | None) -> torch.Tensor:
    """Rows ``ids`` of the target's output matrix, [D, H] bfloat16; None: all of them."""
    import torch

    matrix = target.weights.tensor(EMBEDDING if target.config.tie_embeddings else OUTPUT, torch.bfloat16)
    return matrix if ids is None else matrix[ids]
