"""What a learned drafter's model has of its target's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.errors import ConfigError
from outrider.models.config import EMBEDDING, OUTPUT, ModelConfig, weight_shapes

if TYPE_CHECKING:
    from outrider.models.weights import Weights


def shared_tensors(config: ModelConfig, weights: Weights, target: ModelConfig) -> frozenset[str]:
    """Names, of EMBEDDING and OUTPUT, that ``weights`` lacks and that the target's stand for. A target without an
    output matrix of its own has its embedding for one.

    Raises ConfigError where the target's has another shape.
    """
    shapes = weight_shapes(config)
    missing = frozenset({EMBEDDING, OUTPUT}).intersection(shapes).difference(weights.names())
    there = {EMBEDDING: (target.vocab_size, target.hidden_size), OUTPUT: (target.num_logits, target.hidden_size)}
    for name in missing:
        if shapes[name] != there[name]:
            raise ConfigError(
                f"the drafter has no tensor {name!r}, and its target's has shape {there[name]}, not {shapes[name]}; "
                "use a drafter that was made for this target, or one that has the tensor"
            )
    return missing
