"""How a drafter is trained: a handful of numbers whose defaults need no tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import ConfigError
from outrider.train.modules.shape import Goal


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """Validated when built."""

    epochs: int = _option(1, "passes over the data")
    learning_rate: float | None = _option(
        None, "peak learning rate of Muon, of which AdamW has 0.15; default: by the size of the model"
    )
    batch_tokens: int = _option(2048, "tokens of one update, about")
    draft_steps: int = _option(3, "draft positions that are trained for, each on the drafter's own output before it")
    step_decay: float = _option(0.8, "weight of a draft position's loss over that of the one before")
    warm_up: float = _option(0.03, "part of the updates in which the learning rate rises")
    weight_decay: float = _option(
        0.0, "part of the matrices that goes for each unit of the learning rate; for many passes over little data"
    )
    clip: float = _option(0.5, "largest norm of a gradient")
    held_out: float = _option(0.03, "part of the samples that is never trained on, and measured instead")
    measurements: int = _option(8, "how often the held-out samples are measured")
    checkpoint_minutes: float = _option(3.0, "time between checkpoints")
    seed: int = _option(0, "of what the target writes, of the order of the samples, and of what starts at random")

    def __post_init__(self) -> None:
        whole = (("epochs", 1), ("batch_tokens", 16), ("draft_steps", 1), ("measurements", 1), ("seed", 0))
        for name, least in whole:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
        parts = (("step_decay", 0.0, 1.0), ("weight_decay", 0.0, 10.0), ("warm_up", 0.0, 0.9), ("held_out", 0.0, 0.5))
        positive = (("clip", 0.0, math.inf), ("checkpoint_minutes", 0.0, math.inf), ("learning_rate", 0.0, 1.0))
        for name, low, high in (*parts, *positive):
            value = getattr(self, name)
            if value is None and name == "learning_rate":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not low <= value <= high or (value == low and name in ("clip", "learning_rate")):
                bound = f"between {low:g} and {high:g}" if math.isfinite(high) else f"more than {low:g}"
                raise ConfigError(f"{name}={value!r} must be {bound}")

    @property
    def goal(self) -> Goal:
        return Goal(self.draft_steps, self.step_decay)

    def peak(self, hidden_size: int) -> float:
        """The peak learning rate: wider models take smaller ones."""
        return self.learning_rate or 8e-3 * (576 / hidden_size) ** 0.5

    def rate(self, update: int, updates: int) -> float:
        """Of the peak, at update 0 … updates - 1: a linear rise, then half a cosine down to a twentieth."""
        rise = math.ceil(self.warm_up * updates)
        if update < rise:
            return (update + 1) / (rise + 1)
        done = (update - rise) / max(updates - rise, 1)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
