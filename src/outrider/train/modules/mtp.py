"""Multi-token prediction as DeepSeek-V3 has it (2024): one block behind a projection, applied again and again."""

from __future__ import annotations

import torch

from outrider.models.config import Fusion
from outrider.train.modules.chain import ChainModule
from outrider.train.modules.shape import Shape
from outrider.train.modules.start import drafter_config, start_block, start_norm, start_projection
from outrider.train.modules.target import Target


class MTP(ChainModule):
    method = "mtp"
    normed = True

    @classmethod
    def create(cls, target: Target, shape: Shape, draft_ids: torch.Tensor | None, dtype: torch.dtype) -> MTP:
        config = drafter_config(target.config, shape, draft_ids, Fusion("project"), first_norm=True, final_norm=True)
        last = target.config.num_layers
        module = cls(target, config, (last,), draft_ids, bool(shape.own_output), dtype)
        start_block(module.block, target, last - 1)
        with torch.no_grad():
            module.block.input_layernorm.weight.copy_(target.layer(last - 1, "input_layernorm"))
        start_norm(module.model.norm.weight, target)
        start_projection(module.model.fuse)
        module.is_new = True
        return module
