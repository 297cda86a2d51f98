"""A small template language: sentences with slots, filled from banks of words and sentences.

``{topic}`` takes an entry of the bank ``topic``; written again in the same text it stands for the same entry, and
``{topic2}`` for another one. ``{Topic}`` is the entry with a capital. ``{n:3-40}`` is a whole number from 3 to 40,
``{n:50-900x10}`` one in steps of ten, and ``{n}`` afterwards the same number. Entries may hold slots of their own.
An "a" before a slot becomes "an" where the entry wants it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

BANKS = Path(__file__).resolve().parents[1] / "banks"

_SLOT = re.compile(r"(\b[Aa] )?\{([A-Za-z][a-z_]*)(\d?)(?::(\d+)-(\d+)(?:x(\d+))?)?\}")
_VOWEL = re.compile(r"(?!uni|use|eu|one)[aeiou]|(?:8|11\b|18\b)", re.I)


@cache
def bank(name: str) -> Any:
    """The content of ``banks/NAME.json``."""
    return json.loads((BANKS / f"{name}.json").read_text(encoding="utf-8"))


class Filler:
    """Fills the slots of one prompt, and remembers what each stands for.

    Args:
        rng: Where every choice comes from.
        slots: Banks by name, before those of ``banks/common.json``.
    """

    def __init__(self, rng: random.Random, slots: Mapping[str, Sequence[str]] | None = None) -> None:
        self._rng = rng
        self._slots = {**bank("common"), **(slots or {})}
        self._chosen: dict[str, str] = {}

    def fill(self, template: str) -> str:
        """The template with every slot replaced. Raises KeyError for a slot that has no bank."""
        return _SLOT.sub(self._value, template)

    def _value(self, match: re.Match[str]) -> str:
        article, name, digit, low, high, step = match.groups()
        key = name.lower() + digit
        if low is not None:
            self._chosen[key] = str(self._rng.randrange(int(low), int(high) + 1, int(step or 1)))
        elif key not in self._chosen:
            self._chosen[key] = self._choose(name.lower())
        value = self._chosen[key]
        value = value[:1].upper() + value[1:] if name[0].isupper() else value
        if article is None:
            return value
        return (article.strip() + "n " if _VOWEL.match(value) else article) + value

    def _choose(self, name: str) -> str:
        entries = self._slots[name]
        taken = {value for key, value in self._chosen.items() if key.rstrip("0123456789") == name}
        free = [entry for entry in entries if entry not in taken]
        return self.fill(self._rng.choice(free or list(entries)))


def from_templates(name: str, rng: random.Random) -> str:
    """A prompt of the bank ``name``: one of its ``templates``, filled from its ``slots``."""
    content = bank(name)
    return Filler(rng, content.get("slots")).fill(rng.choice(content["templates"]))
