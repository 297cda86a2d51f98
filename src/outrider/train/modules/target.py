"""What a drafter under training takes from its target and leaves as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.models.config import EMBEDDING, FINAL_NORM, OUTPUT, ModelConfig
from outrider.models.loader import Model
from outrider.models.weights import Weights
from outrider.train.modules.layers import rms_norm


@dataclass(frozen=True)
class Target:
    """name, config, weights: of the target. embedding, output: [V, H] bfloat16, one tensor if the target ties them.

    norm: [H] float32, the target's final norm.
    """

    name: str
    config: ModelConfig
    weights: Weights
    embedding: torch.Tensor
    output: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def load(cls, model: Model) -> Target:
        """Raises ModelFileError for a tensor that is missing."""
        embedding = model.weights.tensor(EMBEDDING, torch.bfloat16)
        tied = model.config.tie_embeddings
        output = embedding if tied else model.weights.tensor(OUTPUT, torch.bfloat16)
        norm = model.weights.tensor(FINAL_NORM, torch.float32)
        return cls(model.name, model.config, model.weights, embedding, output, norm)

    def normed(self, final: torch.Tensor) -> torch.Tensor:
        """States after the last block [..., H] -> float32, after the final norm."""
        return rms_norm(final, self.norm, self.config.rms_norm_eps)

    def layer(self, number: int, name: str) -> torch.Tensor:
        """A matrix of one block, float32; ``name`` as in "mlp.up_proj"."""
        return self.weights.tensor(f"model.layers.{number}.{name}.weight", torch.float32)
