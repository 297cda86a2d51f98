"""Room on the disk: what training writes is large, and a full disk would take more down than the training."""

from __future__ import annotations

import shutil
from pathlib import Path

from outrider.core.errors import OutriderError

KEPT_FREE = 1 << 30
"""Bytes that training leaves free, for everybody else."""


class DiskFullError(OutriderError):
    """The disk is nearly full; what was written so far is whole, and the same command goes on from there."""


def check_room(folder: Path, size: int, *, kept_free: int = KEPT_FREE) -> None:
    """Raise DiskFullError unless ``size`` more bytes in ``folder`` leave ``kept_free`` bytes of its disk free."""
    free = shutil.disk_usage(folder).free
    if free - size < kept_free:
        raise DiskFullError(
            f"the disk of {folder} is nearly full: {free / 1e9:.1f} GB free, of which {kept_free / 1e9:.1f} GB are "
            "left alone; make room and run the same command again, which goes on from here"
        )
