"""What tells one training from another, so that files made in one are not gone on with in another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.heads.head import Head
    from outrider.models.loader import Model


@dataclass(frozen=True)
class Origin:
    """What a training begins with, beside its data and configuration.

    target: `target_digest`, and what else decides its hidden states. drafter: `head_digest` of the one to go on from.
    """

    target: str
    drafter: str = "new"


def target_digest(model: Model) -> str:
    """sha256 of a model's configuration and weights: of its files, or of its tensors if it was made in memory.

    Raises OSError if a file cannot be read.
    """
    from outrider.models.digests import file_digest

    parts = [repr(model.config)]
    if model.source is not None:
        files = [model.source] if model.source.is_file() else sorted(model.source.glob("*.safetensors"))
        parts += [file_digest(file) for file in files]
    else:
        for name in sorted(model.weights.names()):
            parts += [name, hashlib.sha256(model.weights.raw(name).data.tobytes()).hexdigest()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def head_digest(head: Head) -> str:
    """sha256 of what a drafter computes: its shape, its vocabulary and its tensors, wherever they were read from."""
    import torch

    ids = None if head.draft_ids is None else head.draft_ids.tolist()
    parts = [repr((head.method, head.feature_layers, head.normed, head.config, ids))]
    for name, tensor in sorted(head.tensors.items()):
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}", hashlib.sha256(content).hexdigest()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
