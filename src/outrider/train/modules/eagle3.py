"""EAGLE-3 (Li et al., 2025): features of three layers joined to one, tokens learned directly, a draft vocabulary."""

from __future__ import annotations

import torch

from outrider.core.errors import ConfigError
from outrider.heads.eagle3 import usual_layers
from outrider.models.config import Fusion
from outrider.train.modules.chain import ChainModule
from outrider.train.modules.shape import Shape
from outrider.train.modules.start import drafter_config, pass_tokens, start_block, start_norm
from outrider.train.modules.target import Target


class Eagle3(ChainModule):
    method = "eagle3"

    @classmethod
    def create(cls, target: Target, shape: Shape, draft_ids: torch.Tensor | None, dtype: torch.dtype) -> Eagle3:
        config = drafter_config(target.config, shape, draft_ids, Fusion("attend"), first_norm=False, final_norm=True)
        own_output = True if shape.own_output is None else shape.own_output
        layers = usual_layers(target.config.num_layers)
        if not 0 < layers[0] < layers[1] < layers[2]:
            raise ConfigError(f"eagle3 reads a low, a middle and a high layer; {target.name} has too few for that")
        module = cls(target, config, layers, draft_ids, own_output, dtype)
        last = target.config.num_layers - 1
        start_block(module.block, target, last)
        start_norm(module.model.norm.weight, target)
        with torch.no_grad():
            module.model.feature_norm.weight.copy_(target.layer(last, "input_layernorm"))
            module.features.weight.zero_()  # as long as no batch was seen, the feature is the highest layer's state
            module.features.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
        module.is_new = True
        return module

    def start(self, matrix: torch.Tensor, embeddings: torch.Tensor) -> None:
        size = self.config.hidden_size
        self.features.stand_for(matrix[:, :-size])
        pass_tokens(self.block, self.config, matrix[:, -size:], embeddings)
