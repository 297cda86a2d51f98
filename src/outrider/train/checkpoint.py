"""Checkpoints: all that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.core.errors import UsageError
from outrider.models.cache import replacing
from outrider.train.disk import check_room

NAME = "checkpoint.pt"


def write(folder: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` (tensors, numbers, texts, lists and dictionaries of them) in place of the last checkpoint.

    The last one stays whole until the new one is on the disk. Raises DiskFullError if the new one would take the last
    of the room beside it.
    """
    check_room(folder, _size(state), kept_free=0)
    with replacing(folder / NAME) as part, part.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> dict[str, Any] | None:
    """The last checkpoint in ``folder``; None if there is none. Raises UsageError for a broken file."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is not a checkpoint that can be read ({error}); remove it to start anew") from None
    return state


def _size(value: Any) -> int:
    """Bytes of all tensors in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_size(entry) for entry in value.values())
    return sum(_size(entry) for entry in value) if isinstance(value, (list, tuple)) else 0
