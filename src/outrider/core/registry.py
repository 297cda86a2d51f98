"""Name -> implementation, imported on first use. The only place where a name chooses code."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from outrider.core.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of implementations, each given as ``"package.module:attribute"`` and imported when first asked for.

    >>> rules: Registry[type] = Registry("acceptance rule", {"coupled": "outrider.acceptance.coupled:Coupled"})
    >>> rules.names()
    ('coupled',)
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self._kind = kind
        self._entries = dict(entries)

    def register(self, name: str, target: str) -> None:
        """Add or replace one entry, ``target`` being ``"package.module:attribute"``."""
        self._entries[name] = target

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def check(self, name: str) -> str:
        """Return ``name``; raise UnknownNameError, naming the nearest known one, if it is not in the table."""
        if name not in self._entries:
            raise UnknownNameError(self._kind, name, self._entries)
        return name

    def get(self, name: str) -> T:
        """Import and return the implementation. Raises UnknownNameError."""
        module, _, attribute = self._entries[self.check(name)].partition(":")
        value: Any = getattr(importlib.import_module(module), attribute)
        return value  # type: ignore[no-any-return]
