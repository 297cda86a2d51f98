"""From a target's hidden states to the one feature a position that a learned drafter reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.heads.head import FEATURES
from outrider.models.config import FINAL_NORM

if TYPE_CHECKING:
    import torch

    from outrider.drafters.base import DrafterContext, Observation
    from outrider.executors.base import Dense
    from outrider.executors.torch.norm import Norm
    from outrider.heads.head import Head
    from outrider.models.loader import Model


States = npt.NDArray[np.float32]
"""Hidden states, or features, of some rows, [R, size]. Arrays: for a few rows torch's calls cost more than these."""


class Features:
    """Gathers the states of committed positions, and turns them into features when they are needed."""

    def __init__(self, head: Head, context: DrafterContext) -> None:
        self.layers = head.feature_layers
        self._norm = _final_norm(context.target) if head.normed else None
        self._join: Dense | None = None
        if FEATURES in head.tensors:
            self._join = context.open_executor.dense(head.tensors[FEATURES])

    def states(self, observation: Observation, rows: Sequence[int]) -> States:
        """States [len(rows), layers * H], one layer after the other, of rows of an observation, its context included.

        A copy: an observation's own tensors are parts of everything that the forward pass returned.
        """
        picked = [as_array(observation.hidden[layer], rows) for layer in self.layers]
        return picked[0] if len(picked) == 1 else np.concatenate(picked, axis=1)

    def of(self, states: States) -> torch.Tensor:
        """Features [R, H] of states [R, layers * H]."""
        import torch

        features = torch.from_numpy(states)
        if self._norm is not None:
            features = self._norm(features)
        return features if self._join is None else self._join(features)


def _final_norm(target: Model) -> Norm:
    import torch

    from outrider.executors.torch.norm import Norm

    return Norm(target.weights.tensor(FINAL_NORM, torch.float32), target.config.rms_norm_eps)


def as_array(hidden: torch.Tensor, rows: Sequence[int]) -> States:
    """A copy of some rows of an executor's hidden states, float32 on the CPU."""
    import torch

    if hidden.device.type == "cpu" and hidden.dtype == torch.float32:
        picked: States = hidden.numpy()[rows]
        return picked
    return hidden[rows].to("cpu", torch.float32).numpy()
