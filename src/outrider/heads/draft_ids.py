"""Reduced draft vocabularies: which of the target's tokens a head has logits for, as files say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.errors import HeadMismatchError

if TYPE_CHECKING:
    import torch

    from outrider.heads.checkpoint import Checkpoint
    from outrider.heads.head import Head

OFFSETS, MASK = "d2t", "t2d"
"""EAGLE-3's two tensors. d2t [D]: column i stands for the target's token i + d2t[i]. t2d [V]: has it a column?"""


def read_offsets(checkpoint: Checkpoint, vocab_size: int) -> torch.Tensor | None:
    """The target's id of each column, [D] int64, in the columns' order; None if there is neither d2t nor t2d.

    Raises HeadMismatchError if the two contradict each other.
    """
    import torch

    if OFFSETS not in checkpoint:
        if MASK not in checkpoint:
            return None
        ids = checkpoint.whole_numbers(MASK).nonzero().flatten()
        check_ids(ids, vocab_size, f"{checkpoint.path}: {MASK}")
        return ids
    offsets = checkpoint.whole_numbers(OFFSETS)
    ids = torch.arange(len(offsets)) + offsets
    check_ids(ids, vocab_size, f"{checkpoint.path}: {OFFSETS}")
    if MASK in checkpoint:
        mask = checkpoint.whole_numbers(MASK)
        if not torch.equal(mask.nonzero().flatten(), ids.sort().values):
            raise HeadMismatchError(f"{checkpoint.path}: {OFFSETS} and {MASK} do not name the same tokens")
    return ids


def check_ids(ids: torch.Tensor, vocab_size: int, where: str) -> None:
    """Raise HeadMismatchError unless all ``ids`` [D] are in the vocabulary, each one once."""
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise HeadMismatchError(f"{where} names tokens outside of a vocabulary of {vocab_size}")
    if len(set(ids.tolist())) != len(ids):
        raise HeadMismatchError(f"{where} names a token twice")


def written_offsets(head: Head) -> dict[str, torch.Tensor]:
    """d2t and t2d of a head with a reduced vocabulary; nothing for any other."""
    import torch

    if head.draft_ids is None:
        return {}
    mask = torch.zeros(head.vocab_size, dtype=torch.bool)
    mask[head.draft_ids] = True
    return {OFFSETS: head.draft_ids - torch.arange(len(head.draft_ids)), MASK: mask}


def ascending(
    ids: torch.Tensor | None, vocab_size: int, tensors: dict[str, torch.Tensor], outputs: tuple[str, ...]
) -> torch.Tensor | None:
    """``ids`` in ascending order, the rows of the tensors ``outputs`` moved along (in place, in ``tensors``).

    None if they are all of the vocabulary, which needs no map.
    """
    if ids is None:
        return None
    ordered = ids.sort()
    if not ids.equal(ordered.values):
        for name in outputs:
            if name in tensors and len(tensors[name]) == len(ids):
                tensors[name] = tensors[name][ordered.indices]
    return None if len(ids) == vocab_size else ordered.values
