"""What is compared: a list of speculative configurations, each under a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from outrider.core.config import SpeculativeConfig
from outrider.core.errors import ConfigError


@dataclass(frozen=True)
class Method:
    """One configuration under measurement. label: how reports call it, unique within a run."""

    label: str
    config: SpeculativeConfig


def parse_methods(text: str, draft_model: str | None = None) -> list[Method]:
    """Read ``--methods``: names (joined by ``+`` for a cascade) or JSON objects, separated by commas.

    ``draft_model`` is the drafter's model for every method that needs one and does not name its own.
    Raises ConfigError for an empty list, a method given twice, or a ``draft_model`` that nothing uses.
    """
    methods: list[Method] = []
    used = False
    for part in _split(text):
        config, took = _parse_one(part, draft_model)
        used = used or took
        method = Method(_label(config, draft_model), config)
        if any(other.label == method.label for other in methods):
            raise ConfigError(f"--methods holds {method.label!r} twice")
        methods.append(method)
    if not methods:
        raise ConfigError("--methods is empty; name at least one, such as none,suffix")
    if draft_model is not None and not used:
        raise ConfigError("--draft-model is given, but no method is 'draft_model' without a model of its own")
    return methods


def baseline(methods: Sequence[Method]) -> Method | None:
    """Plain decoding, if it is among them: what speed-ups are relative to."""
    return next((method for method in methods if method.config.members == ("none",)), None)


def _parse_one(part: str, draft_model: str | None) -> tuple[SpeculativeConfig, bool]:
    """The configuration, and whether it took ``draft_model``."""
    if part.startswith("{") or "draft_model" not in part:
        return SpeculativeConfig.parse(part), False
    if draft_model is None:
        raise ConfigError(f"method {part!r} needs --draft-model: the drafter's alias, path or hub id")
    return SpeculativeConfig(method=part, model=draft_model), True


def _split(text: str) -> list[str]:
    """Split at the commas that are outside braces."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _label(config: SpeculativeConfig, draft_model: str | None) -> str:
    """The method's name, and every setting that differs from the default."""
    plain = SpeculativeConfig(method=config.method, model=config.model)
    changed = [
        f"{f.name}={getattr(config, f.name)}"
        for f in fields(config)
        if f.name not in ("method", "model") and getattr(config, f.name) != getattr(plain, f.name)
    ]
    if config.model is not None and config.model != draft_model:
        changed.insert(0, f"model={config.model}")
    return config.method + (f"({', '.join(changed)})" if changed else "")
