"""From a target's hidden states to the one feature a position that a learned drafter reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.heads.head import FEATURES
from outrider.models.config import FINAL_NORM

if TYPE_CHECKING:
    import torch

    from outrider.drafters.base import DrafterContext, Observation
    from outrider.executors.base import Dense
    from outrider.executors.torch.norm import Norm
    from outrider.heads.head import Head
    from outrider.models.loader import Model


class Features:
    """Gathers the states of committed positions, and turns them into features when they are needed."""

    def __init__(self, head: Head, context: DrafterContext) -> None:
        self.layers = head.feature_layers
        self._norm = _final_norm(context.target) if head.normed else None
        self._join: Dense | None = None
        if FEATURES in head.tensors:
            self._join = context.open_executor.dense(head.tensors[FEATURES])

    def states(self, observation: Observation, rows: Sequence[int]) -> torch.Tensor:
        """States [len(rows), layers * H], float32 on the CPU, of rows of an observation, its context included."""
        return hidden_rows(observation, self.layers, rows)

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """Features [R, H] of states [R, layers * H]."""
        if self._norm is not None:
            states = self._norm(states)
        return states if self._join is None else self._join(states)


def _final_norm(target: Model) -> Norm:
    import torch

    from outrider.executors.torch.norm import Norm

    return Norm(target.weights.tensor(FINAL_NORM, torch.float32), target.config.rms_norm_eps)


def hidden_rows(observation: Observation, layers: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    """Hidden states [len(rows), layers * H], float32 on the CPU, one layer after the other, of rows of an observation.

    A copy: an observation's own tensors are parts of everything that the forward pass returned.
    """
    import torch

    picked = [observation.hidden[layer][list(rows)].to("cpu", torch.float32) for layer in layers]
    return picked[0] if len(picked) == 1 else torch.cat(picked, dim=1)
