"""From a name to a model: alias, local path or hub id -> configuration, weights and tokenizer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import ModelNotFoundError, UnknownNameError
from outrider.models.aliases import ALIASES

if TYPE_CHECKING:
    from outrider.models.config import ModelConfig
    from outrider.models.tokenizer import Tokenizer
    from outrider.models.weights import Weights

_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(?:[:/](?P<file>[\w./-]+\.gguf))?")


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
    """Open the model that ``name`` stands for, and fetch it first if need be.

    name: an alias; a GGUF file; a folder of safetensors with config.json, or with exactly one GGUF file; a hub id
    ``org/name``, or one file of a repository, ``org/name:file.gguf``. A path that exists wins over a hub id.
    progress: show download bars on standard error.

    Raises UnknownNameError, ModelNotFoundError, ModelFileError, ChecksumError or UnsupportedModelError, each one clear
    line.
    """
    source = _locate(name, progress)
    return _open_gguf(name, source) if source.is_file() else _open_folder(name, source)


def _locate(name: str, progress: bool) -> Path:
    """The GGUF file or the folder that ``name`` stands for; in the cache if it had to be fetched."""
    if name in ALIASES:
        from outrider.models.fetch import fetch

        return fetch(ALIASES[name], progress=progress)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if _looks_like_path(name):
        raise ModelNotFoundError(f"{name}: there is no such file or folder")
    match = _HUB_ID.fullmatch(name)
    if match is None:
        raise UnknownNameError("model", name, ALIASES)
    from outrider.models.hub import snapshot

    return snapshot(match["repository"], match["file"], progress=progress)


def _looks_like_path(name: str) -> bool:
    """Whether the user meant a path: it starts like one, or is a GGUF file in no repository."""
    file_outside_hub = name.endswith(".gguf") and ":" not in name and name.count("/") < 2
    return name.startswith((".", "/", "~")) or "\\" in name or file_outside_hub


def _open_folder(name: str, folder: Path) -> Model:
    if not (folder / "config.json").exists():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return _open_gguf(name, files[0])
        if files:
            listed = ", ".join(file.name for file in files)
            raise ModelNotFoundError(f"{folder}: several GGUF files ({listed}); name the one you mean")
        raise ModelNotFoundError(f"{folder}: neither config.json nor a GGUF file in this folder")
    from outrider.models.config_hf import config_from_folder
    from outrider.models.tokenizer import tokenizer_from_folder
    from outrider.models.weights_safetensors import SafetensorsWeights

    config = config_from_folder(folder)
    weights = SafetensorsWeights(folder, config)
    return _model(name, config, weights, tokenizer_from_folder(folder), folder)


def _open_gguf(name: str, path: Path) -> Model:
    from outrider.models.config_gguf import config_from_gguf
    from outrider.models.gguf import GGUFFile
    from outrider.models.tokenizer import tokenizer_from_gguf
    from outrider.models.weights_gguf import GGUFWeights

    file = GGUFFile(path)
    config = config_from_gguf(file)
    return _model(name, config, GGUFWeights(file, config), tokenizer_from_gguf(file), path)


def _model(name: str, config: ModelConfig, weights: Weights, tokenizer: Tokenizer | None, source: Path) -> Model:
    """Joins what configuration and tokenizer say about the tokens that end a text."""
    if tokenizer is not None:
        ends = dict.fromkeys((*config.eos_token_ids, *tokenizer.end_ids))
        config = replace(config, eos_token_ids=tuple(ends))
    return Model(name, config, weights, tokenizer, source)
