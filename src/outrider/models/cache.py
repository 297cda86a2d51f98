"""The user's cache folder, and writing so that nobody ever sees half a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.core.errors import ConfigError


def cache_dir() -> Path:
    """``$OUTRIDER_CACHE``, else ``$XDG_CACHE_HOME/outrider``, else ``~/.cache/outrider``; it need not exist."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider"


def make_folder(path: Path) -> Path:
    """Create a folder of the cache. Raises ConfigError, naming the variable that moves the cache, if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the cache folder {path}: {error.strerror}; set OUTRIDER_CACHE to a folder you can write to"
        ) from None
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside ``path`` for a file that takes its place at the end: ``path`` appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    yield part
    os.replace(part, path)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all, whoever else writes it at the same time."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
