"""Prompts to measure with: one JSON object a line, with ``id``, ``category`` and ``turns`` (the user's turns)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import UnknownNameError, UsageError

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""The prompts that come with the package."""


@dataclass(frozen=True)
class Prompt:
    """One conversation. turns: what the user says, in order; the model answers each turn before the next is said."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(path: str | Path | None = None) -> list[Prompt]:
    """Read a prompt file, or `OWN_PROMPTS`. Raises UsageError, naming file and line, for what is not a prompt."""
    path = Path(path or OWN_PROMPTS)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts in {path}: {error}") from None
    prompts = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"{path} holds no prompt")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UsageError(f"{path} holds two prompts with id {prompt.id!r}; ids must be unique")
        seen.add(prompt.id)
    return prompts


def select(prompts: Sequence[Prompt], categories: Sequence[str] = (), limit: int | None = None) -> list[Prompt]:
    """The prompts of ``categories`` (all if none is named), the first ``limit`` of each, in file order.

    Raises UnknownNameError for a category that no prompt has.
    """
    known = {prompt.category for prompt in prompts}
    for category in categories:
        if category not in known:
            raise UnknownNameError("prompt category", category, known)
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        if categories and prompt.category not in categories:
            continue
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if limit is None or taken[prompt.category] <= limit:
            chosen.append(prompt)
    return chosen


def _parse(line: str, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object")
    turns = value.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise UsageError(f"{where}: 'turns' must be a list of texts, and not empty")
    for key in ("id", "category"):
        if not isinstance(value.get(key), str) or not value[key]:
            raise UsageError(f"{where}: {key!r} must be a text, and not empty")
    return Prompt(value["id"], value["category"], tuple(turns))
