"""A drafter to train: a new one of some shape, or one that exists."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.core.errors import ConfigError
from outrider.heads.head import Head
from outrider.train.batches import AHEAD
from outrider.train.data import Sample
from outrider.train.modules import MODULES
from outrider.train.modules.base import DrafterModule
from outrider.train.modules.shape import Shape
from outrider.train.modules.target import Target


def new_module(
    method: str,
    target: Target,
    shape: Shape,
    samples: Iterable[Sample],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> DrafterModule:
    """A new drafter; its draft vocabulary is what ``samples`` make it. seed: of what starts at random.

    Raises UnknownNameError for a method that is not trained, and ConfigError for a shape that the method would ignore.
    """
    kind = MODULES.get(method)
    shape.check_is_read(method)
    size = target.config.vocab_size
    ids = None if shape.draft_vocab in (0, size) else draft_vocabulary(samples, shape.draft_vocab, size)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return kind.create(target, shape, ids, dtype)


def module_from_head(head: Head, target: Target, *, dtype: torch.dtype = torch.bfloat16) -> DrafterModule:
    """Go on from a drafter that exists. Raises HeadMismatchError if it does not fit, or cannot be trained."""
    return MODULES.get(head.method).from_head(head, target, dtype)


def draft_vocabulary(samples: Iterable[Sample], count: int, vocab_size: int) -> torch.Tensor:
    """The ids that are learned most often, [count] int64 ascending; the lowest ones first where there is a tie.

    Raises ConfigError if there are not that many in the vocabulary.
    """
    if count > vocab_size:
        raise ConfigError(f"draft_vocab={count} is more than the target's vocabulary of {vocab_size}")
    times = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        tokens = torch.tensor(list(sample.tokens), dtype=torch.int64)
        for start, end in sample.loss_from:
            times += tokens[max(start, AHEAD) : end].bincount(minlength=vocab_size)
    return times.argsort(descending=True, stable=True)[:count].sort().values
