"""Medusa's heads: from one feature to a guess at each of the next few tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.heads.standalone import output_rows
from outrider.models.config import OUTPUT

if TYPE_CHECKING:
    import torch

    from outrider.drafters.base import OpenExecutor
    from outrider.executors.base import Dense
    from outrider.heads.head import Head
    from outrider.models.loader import Model


class MedusaHeads:
    """Every head is a few residual blocks, x + silu(W x + b), and an output matrix: its own, or one for all of them.

    The first blocks of all heads read the same feature and are one product, and so is the output if it is shared.
    """

    def __init__(self, head: Head, target: Model, open_executor: OpenExecutor) -> None:
        """Raises what `OpenExecutor.dense` raises."""
        import torch

        self.count = head.num_heads
        blocks = [_blocks(head, k) for k in range(self.count)]
        first = [k for k in range(self.count) if blocks[k]]
        self._first = open_executor.dense(torch.cat([blocks[k][0][0] for k in first])) if first else None
        self._first_of = first
        self._biases = [[bias.to(torch.float32) for _, bias in own] for own in blocks]
        self._further = [[open_executor.dense(weight) for weight, _ in own[1:]] for own in blocks]
        own = [head.tensors.get(f"heads.{k}.output.weight") for k in range(self.count)]
        if any(matrix is None for matrix in own):
            shared = head.tensors.get(OUTPUT)
            lent = output_rows(head, target.weights, torch.bfloat16) if shared is None else shared
            common = open_executor.dense(lent)
        self._outputs: list[Dense] = [common if matrix is None else open_executor.dense(matrix) for matrix in own]

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Features [B, H], float32 on the CPU -> logits [heads, B, D]."""
        import torch

        states = torch.stack(self._through_blocks(features))
        if all(output is self._outputs[0] for output in self._outputs):
            return self._outputs[0](states.flatten(0, 1)).reshape(*states.shape[:2], -1)
        return torch.stack([output(own) for output, own in zip(self._outputs, states, strict=True)])

    def _through_blocks(self, features: torch.Tensor) -> list[torch.Tensor]:
        import torch

        states = [features] * self.count
        if self._first is not None:
            for k, added in zip(self._first_of, self._first(features).chunk(len(self._first_of), dim=1), strict=True):
                states[k] = features + torch.nn.functional.silu(added + self._biases[k][0])
        for k, products in enumerate(self._further):
            for product, bias in zip(products, self._biases[k][1:], strict=True):
                states[k] = states[k] + torch.nn.functional.silu(product(states[k]) + bias)
        return states


def _blocks(head: Head, k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weight and bias of each block of head ``k``, in order."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    while (name := f"heads.{k}.blocks.{len(found)}") + ".weight" in head.tensors:
        found.append((head.tensors[f"{name}.weight"], head.tensors[f"{name}.bias"]))
    return found
