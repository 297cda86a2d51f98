"""From a name to a model: alias, local path or hub id -> configuration, weights and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.models.config import ModelConfig
    from outrider.models.tokenizer import Tokenizer
    from outrider.models.weights import Weights


@dataclass(frozen=True)
class Model:
    """A model on disk, ready to be run. Opening it reads no weights yet.

    name: as the user gave it. source: the GGUF file, or the folder of safetensors.
    tokenizer: None for a model built in memory that is driven by token ids alone.
    """

    name: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer | None = None
    source: Path | None = None


def load_model(name: str, *, progress: bool = True) -> Model:
    """Open the model that ``name`` stands for: an alias (fetched if need be), a local file or folder, or a hub id.

    Raises UnknownNameError, ModelNotFoundError, ModelFileError, ChecksumError or UnsupportedModelError, each one clear
    line.
    """
    raise NotImplementedError
