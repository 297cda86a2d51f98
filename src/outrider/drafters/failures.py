"""Drafts that were lost to logits that cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Mapping

_log = logging.getLogger(__name__)


class Failures:
    """The requests that a drafter with a model of its own could not draft for, until `Drafter.take_failures` asks."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._requests: set[int] = set()
        self._said = False

    def add(self, request_id: int, error: Exception) -> None:
        """A request goes without its draft."""
        self._requests.add(request_id)
        if not self._said:
            self._said = True
            _log.warning("%s: a request goes without its draft (%s); said once, counted always", self._drafter, error)

    def take(self) -> Mapping[str, frozenset[int]]:
        """The requests since the last call, as `Drafter.take_failures` gives them."""
        taken = frozenset(self._requests)
        self._requests.clear()
        return {self._drafter: taken} if taken else {}
