"""Whether a draft model speaks the target's language, token by token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outrider.core.errors import VocabularyMismatchError

if TYPE_CHECKING:
    import torch

    from outrider.models.loader import Model


def check_vocabulary(target: Model, draft: Model) -> None:
    """Raise VocabularyMismatchError unless every token id means the same to both models.

    Columns of logits that pad the vocabulary to a round number do not count. Models without a tokenizer must have
    equally many columns.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        ours, theirs = target.config.vocab_size, draft.config.vocab_size
        if ours != theirs:
            raise VocabularyMismatchError(
                f"draft model {draft.name!r} has {theirs} tokens, the target {target.name!r} has {ours}; "
                "choose a draft model of the target's own family"
            )


def fit_logits(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [R, V] with the target's number of columns: further ones cut off, missing ones -inf."""
    import torch

    missing = vocab_size - logits.shape[1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
