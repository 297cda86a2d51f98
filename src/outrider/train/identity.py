"""What tells one target from another, so that files made with one are not gone on with under another."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.models.loader import Model


def target_digest(model: Model) -> str:
    """sha256 of a model's configuration and weight files; of the configuration alone for one that was made in memory.

    Raises OSError if a file cannot be read.
    """
    from outrider.models.digests import file_digest

    parts = [repr(model.config)]
    if model.source is not None:
        files = [model.source] if model.source.is_file() else sorted(model.source.glob("*.safetensors"))
        parts += [file_digest(file) for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
