"""What is settled before a drafter is trained: how large it is, and what it is trained for. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from outrider.core.errors import ConfigError


def _option(default: Any, text: str, *methods: str) -> Any:
    """A field with its help. methods: those that read it; none: all."""
    return field(default=default, metadata={"help": text, "methods": methods})


@dataclass(frozen=True)
class Shape:
    """How large a new drafter is. Validated when built."""

    draft_vocab: int = _option(8192, "tokens that it can guess, the most frequent ones; 0: all of the vocabulary")
    own_output: bool | None = _option(None, "an output matrix of its own; default: eagle3 has one")
    intermediate_size: int | None = _option(
        None, "inner size of its MLP; default: the target's", "eagle3", "eagle", "mtp"
    )
    num_heads: int = _option(4, "medusa: heads, each of which guesses one token further", "medusa")
    num_blocks: int = _option(1, "medusa: residual blocks of a head", "medusa")

    def __post_init__(self) -> None:
        for name, low in (("draft_vocab", 0), ("intermediate_size", 1), ("num_heads", 1), ("num_blocks", 1)):
            value = getattr(self, name)
            if value is None and name == "intermediate_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}")
        if self.own_output is not None and not isinstance(self.own_output, bool):
            raise ConfigError(f"own_output={self.own_output!r} must be true or false")

    def check_is_read(self, method: str) -> None:
        """Raise ConfigError for an option that is set and that ``method`` would ignore."""
        for option in fields(self):
            methods = option.metadata["methods"]
            if methods and method not in methods and getattr(self, option.name) != option.default:
                raise ConfigError(f"{option.name} is for {', '.join(methods)}; {method} would ignore it")


@dataclass(frozen=True)
class Goal:
    """steps: draft positions that are trained for. decay: weight of each one's loss over that of the one before."""

    steps: int
    decay: float
