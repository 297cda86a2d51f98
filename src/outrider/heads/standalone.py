"""Heads that bring an output matrix, for engines that do not lend them the target's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.heads.head import EMBEDDING, OUTPUT, Head

if TYPE_CHECKING:
    from outrider.models.weights import Weights


def standalone(head: Head, target: Weights) -> Head:
    """The same head with the target's output matrix (of a reduced vocabulary, its rows) among its tensors.

    A head that has an output matrix, or one for each Medusa head, is returned as it is.
    """
    import torch

    outputs = [f"heads.{k}.output.weight" for k in range(head.num_heads)] or [OUTPUT]
    if OUTPUT in head.tensors or all(name in head.tensors for name in outputs):
        return head
    dtype = next((tensor.dtype for tensor in head.tensors.values()), torch.float32)
    matrix = target.tensor(OUTPUT if OUTPUT in target.names() else EMBEDDING, dtype)
    rows = matrix if head.draft_ids is None else matrix[head.draft_ids]
    return replace(head, tensors={**head.tensors, OUTPUT: rows})
