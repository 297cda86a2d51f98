"""What drafters run, a model or a head, read once though it is needed twice: for its size, and to be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ReadOnce:
    """Keeps what was read before its time, until it is asked for in earnest; then whoever asked is its only holder."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Any] = {}

    def get(self, key: tuple[str, ...], read: Callable[[], T], *, keep: bool) -> T:
        """What was kept under ``key``, or else what ``read`` returns. keep: for the next call too."""
        found: T = self._kept.pop(key) if key in self._kept else read()
        if keep:
            self._kept[key] = found
        return found
