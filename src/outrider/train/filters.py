"""Which of the texts that a model has written are worth learning from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from outrider.train.records import Message

LEAST_TOKENS = 4
"""Shorter turns teach nothing, and are often a model that has nothing to say."""

REPEATS = "repeats itself"
LONGEST_PERIOD = 64
_TURNS_OF_A_LOOP = 4
_LEAST_LOOP = 32
_GRAM = 8
_LEAST_NEW = 0.5


def fault(tokens: Sequence[int], text: str) -> str | None:
    """What is wrong with a turn that a model wrote, the token that ended it left out; None if nothing is."""
    if not text.strip():
        return "empty"
    if len(tokens) < LEAST_TOKENS:
        return "too short"
    if "\ufffd" in text:
        return "broken characters"
    if ends_in_a_loop(tokens) or repeats_itself(tokens):
        return REPEATS
    return None


def ends_in_a_loop(tokens: Sequence[int]) -> bool:
    """Whether the last tokens are one short piece, again and again: four times, and 32 tokens at least."""
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(_TURNS_OF_A_LOOP * period, _LEAST_LOOP)
        if length > len(tokens):
            return False
        tail = tokens[-length:]
        if tail[period:] == tail[:-period]:
            return True
    return False


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether more than half of its runs of eight tokens have been there before."""
    count = len(tokens) - _GRAM + 1
    if count < _LEAST_LOOP:
        return False
    return len({tuple(tokens[i : i + _GRAM]) for i in range(count)}) < _LEAST_NEW * count


def question_key(messages: Iterable[Message]) -> str:
    """Equal for conversations that ask the same, but for case, punctuation and spaces."""
    asked = (message["content"] for message in messages if message["role"] == "user")
    return "\n".join(" ".join(re.findall(r"\w+", text.casefold())) or text.strip() for text in asked)
