"""What a drafter's own model costs, before anything has been measured."""

from __future__ import annotations

from outrider.models.config import ModelConfig, weight_shapes


def parameters(config: ModelConfig) -> int:
    """Weights that a forward pass reads: what it costs while memory is the limit. An embedding is only looked up."""
    total = 0
    for name, shape in weight_shapes(config).items():
        if name != "model.embed_tokens.weight" or config.tie_embeddings:
            size = 1
            for n in shape:
                size *= n
            total += size
    return total
