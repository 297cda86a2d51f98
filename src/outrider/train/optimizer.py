"""What moves the parameters: Muon for the matrices inside, AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.models.config import OUTPUT

_BETAS = (0.9, 0.95)
_ADAM = 0.15
"""AdamW's learning rate over Muon's, which bears a larger one."""


class Optimizers:
    """Matrices that turn states into states move in all directions alike (Jordan et al., "Muon", 2024), which gets more
    out of little data; output matrices, norms and biases move by AdamW. The learning rate is Muon's, by the measure of
    Liu et al. ("Muon is scalable for LLM training", 2025), which makes its steps as large as AdamW's at the same rate.
    """

    def __init__(self, module: nn.Module, weight_decay: float = 0.0) -> None:
        """weight_decay: of matrices, a part of them for each unit of the learning rate. Norms and biases have none."""
        inside: list[nn.Parameter] = []
        outputs: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            is_output = name == OUTPUT or name.endswith(".output.weight")
            (vectors if parameter.ndim < 2 else outputs if is_output else inside).append(parameter)
        self._all: list[torch.optim.Optimizer] = []
        if inside:
            self._all.append(torch.optim.Muon(inside, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        groups = [{"params": outputs, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        if outputs or vectors:
            self._all.append(torch.optim.AdamW([g for g in groups if g["params"]], betas=_BETAS, fused=True))
        self._parameters = [*inside, *outputs, *vectors]

    def step(self, rate: float, clip: float) -> None:
        """One update by the gradients, of norm ``clip`` at most, which are dropped then."""
        nn.utils.clip_grad_norm_(self._parameters, clip)
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate if isinstance(optimizer, torch.optim.Muon) else _ADAM * rate
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for optimizer, part in zip(self._all, state, strict=True):
            optimizer.load_state_dict(part)
