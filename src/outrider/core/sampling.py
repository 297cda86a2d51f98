"""Sampling parameters, and the one transform from logits to log-probabilities.

The transform is applied per *node*: the history that penalties and `min_tokens` see is the committed tokens plus the
path to the node, so that an accepted token is treated exactly as plain decoding would treat it. The same transform
serves the target's p and a drafter's q.

Every function here works on one row of logits at a time. A reduction over the vocabulary then always has the same
shape, and with it the same order of additions, however many rows a round has.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from outrider.core.errors import NonFiniteLogitsError, SamplingParamsError, UnknownNameError

if TYPE_CHECKING:
    import torch

MAX_SEED = (1 << 64) - 1
_TOP_P_SCAN = 512


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops. Validated when built; raises SamplingParamsError.

    temperature: 0 is greedy (the default), and must be finite.
    top_k: keep the k most likely tokens, ties with the k-th included; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p, ties included; in (0, 1].
    min_p: keep tokens at least min_p times as likely as the most likely one; in [0, 1].
    repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output; > 0.
    presence_penalty, frequency_penalty: subtracted from the logit of a token in the output, once, or once per
        occurrence; in [-2, 2].
    logit_bias: token id -> number added to its logit, in [-100, 100].
    banned_token_ids: tokens that are never produced.
    max_tokens: output tokens at most; None: as many as the context holds.
    min_tokens: output tokens before the request may end by EOS, a stop token or a stop string.
    stop: strings that end the output; the text returned ends before the first one.
    stop_token_ids: tokens that end the output, next to the model's own end-of-sequence tokens.
    ignore_eos: go on past the model's end-of-sequence tokens.
    include_stop_str_in_output: keep the stop string in the text.
    skip_special_tokens: leave special tokens out of the text.
    seed: 0 … 2^64-1; with it the text is reproducible. None: one is drawn, and the result tells which.
    logprobs: also return the target's log-probability of each output token, and of this many most likely ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: Sequence[int] = ()
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in dict(self.logit_bias).items()})
        for name in ("banned_token_ids", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_ranges()
        self._check_combinations()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from plain keys; an unknown key raises UnknownNameError, naming the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise UnknownNameError("sampling parameter", key, known)
        return cls(**values)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def _check_ranges(self) -> None:
        _check_range("temperature", self.temperature, 0, math.inf, open_high=True)
        _check_int("top_k", self.top_k, 0)
        _check_range("top_p", self.top_p, 0, 1, open_low=True)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True, open_high=True)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100, 100)
        for name in ("banned_token_ids", "stop_token_ids"):
            for token in getattr(self, name):
                _check_int(name, token, 0)
        for token in self.logit_bias:
            _check_int("logit_bias", token, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, 100)

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower one or raise the other"
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise SamplingParamsError("stop holds an empty string or something that is not a string; leave it out")


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SamplingParamsError(f"{name} must be a number, not {value!r}")
    inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    if not inside:
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise SamplingParamsError(f"{name}={value} is outside {left}{low}, {high}{right}")


def _check_int(name: str, value: int, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingParamsError(f"{name} must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise SamplingParamsError(f"{name}={value} must be {bound}")


class SamplingState:
    """The sampling side of one running request: its parameters, its seed and what it has emitted so far.

    Built once a request; `commit` is called for emitted tokens only, one by one, never for drafted ones.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int] = (),
        end_ids: Sequence[int] = (),
    ) -> None:
        """``end_ids``: the model's end-of-sequence tokens. Raises SamplingParamsError for ids beyond the vocabulary."""
        self.params = params
        self.vocab_size = vocab_size
        self.seed = params.seed if params.seed is not None else secrets.randbits(64)
        self.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(end_ids))
        self._prompt = frozenset(prompt)
        self._counts: Counter[int] = Counter()
        self.num_prompt_tokens = len(prompt)
        self.num_output_tokens = 0
        self._banned = list(params.banned_token_ids)
        for name, ids in (
            ("banned_token_ids", self._banned),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise SamplingParamsError(f"{name} holds token {token}; the vocabulary ends at {vocab_size - 1}")
        self._penalises = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.is_argmax = params.greedy and not (
            self._penalises or params.logit_bias or self._banned or params.min_tokens
        )
        """Whether the next token is simply the argmax of the raw logits."""

    @property
    def position(self) -> int:
        """Index, in the sequence, of the token that comes next."""
        return self.num_prompt_tokens + self.num_output_tokens

    def commit(self, token: int) -> None:
        """Record one emitted token."""
        self._counts[token] += 1
        self.num_output_tokens += 1

    def for_other_vocabulary(self, vocab_size: int) -> SamplingState:
        """A view for a drafter whose logits have ``vocab_size`` columns; shares history and seed with this one."""
        state = SamplingState.__new__(SamplingState)
        state.__dict__ = self.__dict__ | {"vocab_size": vocab_size}
        return state

    def logprobs(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """Log-probabilities [V] (float32) of the token that follows ``path``, -inf for those ruled out.

        logits: [V] float32, not changed. path: tokens between the last committed one and this node.
        At temperature 0 the result is a point mass on the argmax, lowest id on ties.
        Raises NonFiniteLogitsError if the logits hold NaN or +inf, or if no token is left.
        """
        import torch

        x = self._adjusted(logits, path)
        top = float(x.max())
        if not math.isfinite(top):
            raise NonFiniteLogitsError("the model returned NaN or infinite logits, or every token is ruled out")
        if self.params.greedy:
            point = torch.full_like(x, -math.inf)
            point[int(x.argmax())] = 0.0
            return point
        x = (x - top) / self.params.temperature
        x = self._truncated(x)
        return torch.log_softmax(x, dim=-1)

    def argmax(self, logits: torch.Tensor, path: Sequence[int] = ()) -> int:
        """The greedy token after ``path``: `logprobs` at temperature 0, without building the distribution."""
        x = self._adjusted(logits, path)
        token = int(x.argmax())
        if not math.isfinite(float(x[token])):
            raise NonFiniteLogitsError("the model returned NaN or infinite logits, or every token is ruled out")
        return token

    def _adjusted(self, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """Logits after bias, bans, min_tokens and penalties; a copy only if something changes."""
        import torch

        params = self.params
        x = logits
        if params.logit_bias:
            x = x.clone()
            ids = torch.tensor(list(params.logit_bias), device=x.device)
            x[ids] += torch.tensor(list(params.logit_bias.values()), dtype=x.dtype, device=x.device)
        if self._penalises:
            x = self._penalised(x.clone() if x is logits else x, path)
        ruled_out = self._banned
        if self.num_output_tokens + len(path) < params.min_tokens:
            ruled_out = ruled_out + sorted(self.end_ids)
        if ruled_out:
            x = x.clone() if x is logits else x
            x[torch.tensor(ruled_out, device=x.device)] = -math.inf
        return x

    def _penalised(self, x: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        import torch

        params = self.params
        counts = self._counts + Counter(path) if path else self._counts
        if params.repetition_penalty != 1:
            ids = torch.tensor(sorted(self._prompt | counts.keys()), dtype=torch.long, device=x.device)
            seen = x[ids]
            x[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        if counts and (params.presence_penalty or params.frequency_penalty):
            ids = torch.tensor(list(counts), device=x.device)
            number = torch.tensor(list(counts.values()), dtype=x.dtype, device=x.device)
            x[ids] -= params.presence_penalty + params.frequency_penalty * number
        return x

    def _truncated(self, x: torch.Tensor) -> torch.Tensor:
        """top-k, then top-p, then min-p on logits whose maximum is 0; tokens ruled out become -inf."""
        import torch

        params = self.params
        if 0 < params.top_k < x.shape[0]:
            x = torch.where(x >= x.topk(params.top_k).values[-1], x, -math.inf)
        if params.top_p < 1:
            x = torch.where(x >= _top_p_threshold(x, params.top_p), x, -math.inf)
        if params.min_p > 0:
            x = torch.where(x >= math.log(params.min_p), x, -math.inf)
        return x


def _top_p_threshold(x: torch.Tensor, top_p: float) -> torch.Tensor:
    """The lowest logit of the smallest set of most likely tokens whose probability reaches ``top_p``."""
    import torch

    probs = torch.softmax(x, dim=-1)
    size = x.shape[0]
    for scan in (min(_TOP_P_SCAN, size), size):
        head, order = probs.topk(scan)
        reached = (head.cumsum(0) >= top_p).nonzero()
        if len(reached):
            return x[order[int(reached[0])]]
    return x.min()


def with_defaults(params: SamplingParams, **changes: Any) -> SamplingParams:
    """A copy with some fields replaced; validated again."""
    return replace(params, **changes)
