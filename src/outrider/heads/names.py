"""Names of tensors: a public layout's and the canonical ones, as a table that is read in both directions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from outrider.heads.checkpoint import Checkpoint

_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""What old checkpoints saved although the configuration says as much."""

Table = Sequence[tuple[str, str]]
"""(beginning of the public name, beginning of the canonical one); the first pair that fits is used."""


def exchange(name: str, pairs: Table) -> str:
    """``name`` with its beginning replaced by the first pair that fits; as it is if there is none."""
    for old, new in pairs:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def read_tensors(
    checkpoint: Checkpoint, table: Table, *, prefix: str = "", without: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by canonical name.

    prefix: only those whose public name begins with it; the table is for what follows. without: public names to leave.
    """
    return {
        exchange(name.removeprefix(prefix), table): checkpoint.tensor(name)
        for name in checkpoint.names
        if name.startswith(prefix) and name not in without and not name.endswith(_BUFFERS)
    }


def public_tensors(tensors: Mapping[str, torch.Tensor], table: Table) -> dict[str, torch.Tensor]:
    """Tensors by the public names of a layout. Of several public names for one canonical name the first is used."""
    back = [(canonical, public) for public, canonical in table]
    return {exchange(name, back): tensor for name, tensor in tensors.items()}
