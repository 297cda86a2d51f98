"""The embedding table, read a row at a time from where the model's file keeps it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.models.config import EMBEDDING, ModelConfig
from outrider.models.quants import dequantize
from outrider.models.weights import Weights


class Embedding:
    """Looks token ids up.

    The rows stay in the file (mapped into memory, quantised if they are), and those of a batch are unpacked when they
    are needed. A table in memory would cost a 1.5B model 0.5 GB, all of it a second copy where the output head is tied.
    """

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        raw = weights.raw(EMBEDDING)
        self._kind = raw.kind
        self._rows = raw.data.reshape(config.vocab_size, -1)
        self._size, self._dtype, self._device = config.hidden_size, dtype, device

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """Rows [len(tokens), hidden_size]."""
        rows = self._rows[list(tokens)]
        return dequantize(self._kind, rows, (len(tokens), self._size), self._dtype).to(self._device)
