"""Configuration of speculation and of the engine, in the ecosystem's own words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.core.errors import ConfigError, LossyNotAllowedError, UnknownNameError

LOSSY_RULES = frozenset({"typical"})

AUTO = ("suffix", "recycle")
"""What ``auto`` drafts with for any target: nothing to train or download, and the planner cuts what does not pay."""

LEARNED = ("eagle3", "mtp", "eagle", "medusa")
"""Drafters that are trained for a target, best first: ``auto`` drafts with one as well, where one is there."""

_OTHER_NAMES = {"deepseek_mtp": "mtp", "mimo_mtp": "mtp"}
"""vLLM's names of methods, where they mean the same as one of ours."""


def _option(default: Any, text: str, *, method: str | tuple[str, ...] = (), rule: str | None = None) -> Any:
    """A field with its help. method, rule: the only drafter or drafters, or acceptance rule, that read it."""
    methods = (method,) if isinstance(method, str) else method
    return field(default=default, metadata={"help": text, "methods": methods, "rule": rule})


@dataclass(frozen=True)
class SpeculativeConfig:
    """How a request is drafted for. The keys are those of vLLM's ``--speculative-config`` where vLLM has them.

    Validated when built. Whether ``method`` exists is checked by the drafter registry, which knows the names.
    """

    method: str = _option(
        "auto",
        "drafter: auto, none, ngram, suffix, recycle, lookahead, draft_model, eagle, eagle3, mtp, medusa, or several "
        "joined by +",
    )
    model: str | None = _option(
        None,
        "model of the drafter: for draft_model an alias, a path or a hub id; for eagle, eagle3, mtp, medusa and auto a "
        "drafter trained for the target, by path or hub id (default: the one that is shipped with it)",
        method=("draft_model", *LEARNED),
    )
    num_speculative_tokens: int | None = _option(None, "draft nodes verified per round at most; default: per method")
    max_draft_depth: int | None = _option(None, "longest drafted path; default: num_speculative_tokens")
    tree_width: int | None = _option(None, "children per node at most, for drafters that draft trees")
    prompt_lookup_max: int = _option(4, "ngram: longest n-gram that is looked up", method="ngram")
    prompt_lookup_min: int = _option(2, "ngram: shortest n-gram that is looked up", method="ngram")
    suffix_decoding_max_tree_depth: int = _option(24, "suffix: longest context that is matched", method="suffix")
    suffix_decoding_max_cached_requests: int = _option(
        256, "suffix: earlier requests of a tenant kept; 0: none", method="suffix"
    )
    suffix_decoding_min_token_prob: float = _option(
        0.1, "suffix: least estimated probability of a drafted token", method="suffix"
    )
    lookahead_window_size: int = _option(
        2, "lookahead: trajectories that the branch moves on; 0: no branch", method="lookahead"
    )
    lookahead_ngram_size: int = _option(3, "lookahead: tokens of an n-gram that the branch finds", method="lookahead")
    lookahead_verification_set_size: int = _option(
        4, "lookahead: n-grams that are offered for verification at most", method="lookahead"
    )
    acceptance: str = _option("coupled", "acceptance rule: coupled, rejection, block, typical")
    allow_lossy: bool = _option(False, "permit a lossy acceptance rule (typical), which changes the output")
    posterior_threshold: float = _option(
        0.09, "typical: probability above which a token is always accepted", rule="typical"
    )
    posterior_alpha: float = _option(0.3, "typical: factor of exp(-entropy) in the threshold", rule="typical")
    adaptive: bool = _option(True, "let the planner shorten or skip drafts that do not pay; never changes the text")

    def __post_init__(self) -> None:
        self._check_values()
        self._check_combinations()

    def _check_values(self) -> None:
        for name in ("method", "acceptance", "model"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "model" and value is None):
                raise ConfigError(f"{name}={value!r} must be a string")
        for name, low in (
            ("num_speculative_tokens", 1),
            ("max_draft_depth", 1),
            ("tree_width", 1),
            ("prompt_lookup_max", 1),
            ("prompt_lookup_min", 1),
            ("suffix_decoding_max_tree_depth", 1),
            ("suffix_decoding_max_cached_requests", 0),
            ("lookahead_window_size", 0),
            ("lookahead_ngram_size", 2),
            ("lookahead_verification_set_size", 0),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}"
            )
        for name in ("suffix_decoding_min_token_prob", "posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r} must be between 0 and 1")
        for name in ("allow_lossy", "adaptive"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")

    def _check_combinations(self) -> None:
        if self.acceptance in LOSSY_RULES and not self.allow_lossy:
            raise LossyNotAllowedError(
                f"acceptance={self.acceptance!r} changes the output; set allow_lossy=true to accept that"
            )
        if "draft_model" in self.members and not self.model:
            raise ConfigError("method 'draft_model' needs 'model': the drafter's alias, path or hub id")
        if "none" in self.members and len(self.members) > 1:
            raise ConfigError(f"method {self.method!r} joins 'none' with a drafter; drop one of them")
        for option in fields(self):
            if getattr(self, option.name) != option.default:
                self._check_is_read(option.name, option.metadata["methods"], option.metadata["rule"])
        if self.acceptance == "block" and (self.tree_width or 1) > 1:
            raise ConfigError(f"acceptance 'block' judges chains; tree_width={self.tree_width} must be 1, or left out")

    def _check_is_read(self, name: str, methods: tuple[str, ...], rule: str | None) -> None:
        """Raise ConfigError for an option that is set and that nothing would read."""
        auto = (*AUTO, *LEARNED)
        used = {part for member in self.members for part in (auto if member == "auto" else (member,))}
        if methods and used.isdisjoint(methods):
            names = " or ".join(repr(method) for method in methods)
            raise ConfigError(f"{name} is for method {names}; method {self.method!r} would ignore it")
        if rule is not None and rule != self.acceptance:
            raise ConfigError(f"{name} is for acceptance {rule!r}; {self.acceptance!r} would ignore it")
        if self.members == ("none",) and name in ("num_speculative_tokens", "max_draft_depth", "tree_width"):
            raise ConfigError(f"method 'none' drafts nothing and would ignore {name}; leave it out")

    @property
    def members(self) -> tuple[str, ...]:
        """The drafters that ``method`` joins by ``+``, by our own names."""
        return _members(self.method)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Build from plain keys; an unknown key raises UnknownNameError, naming the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UnknownNameError("speculative-config key", key, known)
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Read what ``--speculative-config`` takes: a JSON object, or just the name of a method."""
        text = text.strip()
        if not text.startswith(("{", "[", '"')):
            return cls(method=text)
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative-config is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError('speculative-config must be a JSON object such as {"method": "suffix"}')
        return cls.from_dict(values)


def as_speculative_config(value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
    """Accept every form in which users write it; None means the default, ``auto``."""
    if value is None:
        return SpeculativeConfig()
    if isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        return SpeculativeConfig.parse(value)
    return SpeculativeConfig.from_dict(value)


MOST_TOKENS_PER_REQUEST = 256


@dataclass(frozen=True)
class SpeculativeOverride:
    """What one request asks for in place of the engine's own speculation. Validated when built; raises ConfigError.

    method: a method, several joined by ``+``, or ``none``; None for the engine's own.
    num_speculative_tokens: draft nodes verified per round at most; None for the engine's or the method's own number.
    """

    method: str | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        number, limit = self.num_speculative_tokens, MOST_TOKENS_PER_REQUEST
        if self.method is not None and not isinstance(self.method, str):
            raise ConfigError(f"speculative method={self.method!r} must be a string")
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= limit):
            raise ConfigError(f"num_speculative_tokens={number!r} must be a whole number from 1 to {limit}")
        if len(set(self.members)) < len(self.members):
            raise ConfigError(f"method {self.method!r} names a drafter twice; name it once")
        if "none" in self.members:
            if len(self.members) > 1:
                raise ConfigError(f"method {self.method!r} joins 'none' with a drafter; drop one of them")
            if number is not None:
                raise ConfigError("method 'none' drafts nothing and would ignore num_speculative_tokens; leave it out")

    @property
    def members(self) -> tuple[str, ...]:
        """The drafters that ``method`` joins by ``+``; none for the engine's own."""
        return _members(self.method) if self.method is not None else ()


def _members(method: str) -> tuple[str, ...]:
    parts = (part.strip() for part in method.split("+"))
    return tuple(_OTHER_NAMES.get(part, part) for part in parts)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine. Validated when built; raises ConfigError."""

    max_batch_size: int = _option(16, "requests that run at the same time")
    max_context: int | None = _option(None, "longest sequence; default: the model's, at most 8192")
    prefill_chunk: int = _option(512, "prompt tokens of one request per forward pass")
    max_batched_tokens: int = _option(
        2048, "rows per forward pass, all requests together: decoding ones first, then prompts"
    )
    kv_tokens: int | None = _option(
        None,
        "tokens that the KV cache holds, and as many in that of each drafter's model; default: a batch, or four "
        "sequences, of the longest",
    )
    kv_cache_memory: str | int | None = _option(
        None,
        "memory for all KV, drafters' models included, in place of kv_tokens: bytes, or with a unit, as in 2GiB",
    )
    enable_prefix_caching: bool = _option(True, "use the KV of equal beginnings of prompts again, within a tenant")

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_context", "prefill_chunk", "max_batched_tokens", "kv_tokens"):
            value = getattr(self, name)
            if value is None and name in ("max_context", "kv_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(f"enable_prefix_caching={self.enable_prefix_caching!r} must be true or false")
        if self.max_batched_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_batched_tokens={self.max_batched_tokens} must leave a row for each of max_batch_size="
                f"{self.max_batch_size} requests"
            )
        if self.kv_cache_memory is not None:
            if self.kv_tokens is not None:
                raise ConfigError("kv_tokens and kv_cache_memory both size the KV cache; give one of them")
            parse_bytes("kv_cache_memory", self.kv_cache_memory)

    @property
    def kv_bytes(self) -> int | None:
        """``kv_cache_memory`` in bytes."""
        return None if self.kv_cache_memory is None else parse_bytes("kv_cache_memory", self.kv_cache_memory)


_UNITS = {"": 1, **{prefix + "ib": 1 << 10 * power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)}}
_UNITS |= {"b": 1, **{prefix + "b": 1000**power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)}}


def parse_bytes(name: str, value: str | int) -> int:
    """Bytes of a size such as 1073741824, "512MiB" or "2 GB". Raises ConfigError, naming the option."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower()) if isinstance(value, str) else None
    if found is None or found[2] not in _UNITS or int(float(found[1]) * _UNITS[found[2]]) < 1:
        raise ConfigError(f"{name}={value!r} must be a number of bytes, or a number with a unit such as MiB or GiB")
    return int(float(found[1]) * _UNITS[found[2]])
