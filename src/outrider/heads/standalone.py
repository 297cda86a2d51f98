"""The target's output matrix: lent to heads that have none, or given to them for engines that do not lend it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.core.errors import HeadMismatchError
from outrider.heads.head import Head
from outrider.models.config import EMBEDDING, OUTPUT

if TYPE_CHECKING:
    import torch

    from outrider.models.weights import Weights


def standalone(head: Head, target: Weights, *, whole_vocabulary: bool = False) -> Head:
    """The same head with the target's output matrix (of a reduced vocabulary, its rows) among its tensors.

    A head that has an output matrix, or one for each Medusa head, is returned as it is. whole_vocabulary: give it the
    whole matrix and no reduced vocabulary, for engines that know none; raises HeadMismatchError if the head's own
    matrix has a reduced one.
    """
    import torch

    outputs = [f"heads.{k}.output.weight" for k in range(head.num_heads)] or [OUTPUT]
    if OUTPUT in head.tensors or all(name in head.tensors for name in outputs):
        if whole_vocabulary and head.draft_ids is not None:
            raise HeadMismatchError(f"{head.label}: its own output matrix has no rows for the whole vocabulary")
        return head
    if whole_vocabulary:
        head = replace(head, draft_ids=None)
    dtype = next((tensor.dtype for tensor in head.tensors.values()), torch.float32)
    return replace(head, tensors={**head.tensors, OUTPUT: output_rows(head, target, dtype)})


def output_rows(head: Head, target: Weights, dtype: torch.dtype) -> torch.Tensor:
    """The target's output matrix, of a reduced vocabulary its rows: [D or V, H]."""
    matrix = target.tensor(OUTPUT if OUTPUT in target.names() else EMBEDDING, dtype)
    return matrix if head.draft_ids is None else matrix[head.draft_ids]
