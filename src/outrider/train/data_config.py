"""Where the texts come from that a drafter learns from, and how much of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.core.config import parse_bytes
from outrider.core.errors import ConfigError
from outrider.train.synthesis import SynthesisSettings


def _option(default: Any, text: str, written: str | None = None) -> Any:
    """A field with its help. written: the kind of turns, answers or questions, that have to be written to read it."""
    return field(default=default, metadata={"help": text, "written": written})


@dataclass(frozen=True)
class DataConfig:
    """Validated when built."""

    self_synthesize: int = _option(0, "conversations of which the target writes both sides")
    regenerate: bool = _option(False, "have the target answer the questions of conversations that are answered already")
    learn_questions: bool = _option(False, "learn what is asked as well, where there are few answers to learn from")
    max_length: int | None = _option(None, "tokens of a text at most; default: 2048, or what the model can read")
    max_tokens: int | None = _option(None, "tokens to train on at most; default: all")
    disk_budget: str | int = _option("10GiB", "room for hidden states; those left out are made anew each epoch")
    answer_tokens: int = _option(SynthesisSettings.answer_tokens, "longest answer that the target writes", "answers")
    temperature: float = _option(SynthesisSettings.temperature, "of the answers that are not greedy", "answers")
    greedy_share: float = _option(SynthesisSettings.greedy_share, "part of the answers that is greedy", "answers")
    question_tokens: int = _option(SynthesisSettings.question_tokens, "longest question it writes", "questions")
    question_temperature: float = _option(SynthesisSettings.question_temperature, "of the questions", "questions")
    writers: int = _option(32, "conversations that are written at the same time", "answers")

    def __post_init__(self) -> None:
        whole = {"self_synthesize": 0, "max_length": 1, "max_tokens": 1, "answer_tokens": 1, "question_tokens": 1}
        for name, low in (whole | {"writers": 1}).items():
            value = getattr(self, name)
            if value is None and name in ("max_length", "max_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}")
        for name, high in (("temperature", math.inf), ("question_temperature", math.inf), ("greedy_share", 1.0)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value <= high or math.isinf(value):
                bound = f"from 0 to {high:g}" if math.isfinite(high) else "at least 0"
                raise ConfigError(f"{name}={value!r} must be {bound}")
        for name in ("regenerate", "learn_questions"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")
        _ = self.disk_bytes

    @property
    def disk_bytes(self) -> int:
        """``disk_budget`` in bytes."""
        return 0 if self.disk_budget in (0, "0") else parse_bytes("disk_budget", self.disk_budget)

    def settings(self, seed: int) -> SynthesisSettings:
        """How the target writes."""
        return SynthesisSettings(
            self.answer_tokens,
            self.question_tokens,
            self.temperature,
            self.greedy_share,
            self.question_temperature,
            seed,
        )

    def check_is_read(self, written: Iterable[str]) -> None:
        """Raise ConfigError for an option that is set and that nothing would read. written: kinds of turns."""
        for option in fields(self):
            kind = option.metadata["written"]
            if kind is not None and kind not in written and getattr(self, option.name) != option.default:
                raise ConfigError(f"{option.name} is for {kind} that the target writes, and there are none to write")
