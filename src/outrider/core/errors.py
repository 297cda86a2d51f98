"""Every error a caller can provoke, as one typed family.

A `UsageError` is something the caller can mend (a wrong name, a bad value, a broken file); the command line prints
it as one line and exits with code 2. Anything else under `OutriderError` is a failure at run time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutriderError(Exception):
    """Base of all errors raised on purpose by this package."""


class UsageError(OutriderError, ValueError):
    """The caller asked for something that cannot be done; the message says what to do instead."""


class UnknownNameError(UsageError):
    """A name (method, model, option) that is not known."""

    def __init__(self, kind: str, name: str, choices: Iterable[str]) -> None:
        known = sorted(choices)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        super().__init__(f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}.")
        self.kind, self.name, self.choices = kind, name, known


class ConfigError(UsageError):
    """A configuration value that is invalid or contradicts another."""


class SamplingParamsError(ConfigError):
    """A sampling parameter that is out of range or contradicts another."""


class LossyNotAllowedError(ConfigError):
    """A lossy acceptance rule was chosen without opting in to lossy output."""


class ContextLengthError(UsageError):
    """Prompt, or prompt plus output, does not fit the model's context or the KV cache."""


class ModelNotFoundError(UsageError):
    """The model's files are not where they were said to be."""


class ModelFileError(UsageError):
    """A model file is corrupt, truncated or of a format that is not supported."""


class ChecksumError(ModelFileError):
    """A downloaded file does not have the expected sha256."""


class UnsupportedModelError(UsageError):
    """The model's architecture, or a feature of it, is not supported; the message names it."""


class VocabularyMismatchError(UsageError):
    """Drafter and target do not share a vocabulary."""


class HeadMismatchError(UsageError):
    """A learned drafter does not fit the target, or its tensors do not fit each other."""


class KVCacheFullError(OutriderError):
    """The executor has no free KV pages left for the rows of this forward pass."""


class NonFiniteLogitsError(OutriderError):
    """A model returned NaN, or no token is left to choose from."""


class NoTokenLeftError(NonFiniteLogitsError):
    """What the request itself asks for leaves no token to choose, or none that can be found in bearable time."""


class DraftError(OutriderError):
    """A drafter returned a malformed tree (a NaN, an unknown token, a parent after its child)."""
