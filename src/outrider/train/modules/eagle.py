"""EAGLE-1 (Li et al., 2024): the next feature is drafted, and the target's own output matrix reads it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.models.config import Fusion
from outrider.train.batches import Batch
from outrider.train.modules.chain import ChainModule
from outrider.train.modules.shape import Shape
from outrider.train.modules.start import drafter_config, start_block, start_projection
from outrider.train.modules.target import Target

_FEATURE_WEIGHT = 1.0
"""Of the distance to the target's next feature, beside a cross-entropy of weight 1."""


class Eagle(ChainModule):
    method = "eagle"
    normed = True

    @classmethod
    def create(cls, target: Target, shape: Shape, draft_ids: torch.Tensor | None, dtype: torch.dtype) -> Eagle:
        fusion = Fusion("project", norms=False, bias=True)
        config = drafter_config(target.config, shape, draft_ids, fusion, first_norm=False, final_norm=False)
        last = target.config.num_layers
        module = cls(target, config, (last,), draft_ids, bool(shape.own_output), dtype)
        start_block(module.block, target, last - 1)
        start_projection(module.model.fuse)
        module.is_new = True
        return module

    def next_state(self, batch: Batch) -> torch.Tensor:
        return self.target.normed(batch.final)

    def extra_loss(
        self, batch: Batch, states: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor | float:
        """Smooth L1 distance (Girshick, 2015), as the authors have it, mean over the feature."""
        wanted = self.target.normed(batch.final)[rows]
        distance = F.smooth_l1_loss(states, wanted, reduction="none").mean(-1)
        return _FEATURE_WEIGHT * (distance * scale).sum()
