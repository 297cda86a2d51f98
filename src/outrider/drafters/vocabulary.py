"""Whether a draft model speaks the target's language, token by token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from outrider.core.errors import VocabularyMismatchError

if TYPE_CHECKING:
    import torch

    from outrider.models.loader import Model


def check_vocabulary(target: Model, draft: Model) -> None:
    """Raise VocabularyMismatchError unless every token of the target means the same to the draft model.

    Every token that the target's tokenizer uses counts, control tokens and others that were added to it included: to a
    draft model that never saw one, all text behind it is noise, and nobody would be told. What does not count is
    padding: columns of logits beyond the tokenizer, and ids that its vocabulary leaves unused. The draft model may know
    further tokens, which are never proposed. Models without a tokenizer must have equally many columns of logits.
    """
    problem = _difference(target, draft)
    if problem is not None:
        raise VocabularyMismatchError(
            f"draft model {draft.name!r} does not share the vocabulary of {target.name!r}: {problem}; "
            "choose a draft model of the target's own family"
        )


def _difference(target: Model, draft: Model) -> str | None:
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        sizes = draft.config.vocab_size, target.config.vocab_size
        return None if sizes[0] == sizes[1] else f"it has {sizes[0]} tokens instead of {sizes[1]}"
    if draft.config.vocab_size < ours.vocab_size:
        return f"it has {draft.config.vocab_size} tokens instead of {ours.vocab_size}"
    if ours.fingerprint == theirs.fingerprint:
        return None
    for token in range(ours.vocab_size):
        wanted, found = ours.token_bytes(token), theirs.token_bytes(token)
        if wanted and not found:
            return f"it lacks token {token}, {wanted!r}"
        if wanted and found != wanted:
            return f"token {token} is {found!r} instead of {wanted!r}"
    return None


def fit_logits(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [R, V] with the target's number of columns: further ones cut off, missing ones -inf."""
    import torch

    missing = vocab_size - logits.shape[1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-math.inf)
