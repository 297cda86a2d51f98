"""Sampling parameters, and the one transform from logits to log-probabilities.

The transform is applied per *node*: the history that penalties and `min_tokens` see is the committed tokens plus the
path to the node, so that an accepted token is treated exactly as plain decoding would treat it. The same transform
serves the target's p and a drafter's q.

It works on one row of logits at a time. A reduction over the vocabulary then always has the same shape, and with it the
same order of additions, however many rows a round has.

The order of steps is that of Hugging Face's `generate` and of vLLM: logit bias, penalties, bans, min_tokens and the
grammar's mask, then temperature, top-k, top-p, min-p. Two details differ from one engine to the next, and are settled
here: tokens that tie with the last one let through are let through as well, and top-p counts probability relative to
what top-k left over.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outrider.core import transform
from outrider.core.candidates import CandidateTransform
from outrider.core.errors import NonFiniteLogitsError, NoTokenLeftError, SamplingParamsError, UnknownNameError
from outrider.core.history import History
from outrider.core.structured import StructuredOutputs
from outrider.core.transform import Row

if TYPE_CHECKING:
    import torch

    from outrider.core.mask import TokenMask

MAX_SEED = (1 << 64) - 1
_NUMBER = re.compile(r"[0-9]{1,18}")


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
    structured_outputs: what the output must look like: a JSON schema, a regular expression, a grammar or one of some
        texts (`StructuredOutputs`, or its fields as a dict).
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
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "banned_token_ids", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "structured_outputs", _as_structured(self.structured_outputs))
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
        for token, bias in self.logit_bias.items():
            if isinstance(token, str):
                raise SamplingParamsError(f"logit_bias has the key {token[:40]!r}, which is no token id")
            _check_int("logit_bias", token, 0)
            _check_range("logit_bias", bias, -100, 100)
        for name in ("banned_token_ids", "stop_token_ids"):
            for token in getattr(self, name):
                _check_int(name, token, 0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingParamsError(f"{name} must be true or false, not {getattr(self, name)!r}")
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
        if self.structured_outputs is not None and self.ignore_eos:
            raise SamplingParamsError(
                "structured_outputs ends with the model's end-of-sequence token, which ignore_eos would pass over; "
                "drop one of them"
            )


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) and name == "stop":
        return (value,)
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise SamplingParamsError(f"{name} must be a list, not {value!r}")
    return tuple(value)


def _as_bias(value: Any) -> dict[int, float]:
    """``logit_bias`` with its keys as integers; JSON can only write them as strings."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SamplingParamsError(f"logit_bias must map token ids to numbers, not {value!r}")
    bias = {int(key) if isinstance(key, str) and _NUMBER.fullmatch(key) else key: each for key, each in value.items()}
    if len(bias) < len(value):
        raise SamplingParamsError("logit_bias holds a token twice; name it once")
    return bias


def _as_structured(value: Any) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise SamplingParamsError(f'structured_outputs must be an object such as {{"regex": "[a-z]+"}}, not {value!r}')
    return StructuredOutputs.from_dict(value)


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
        mask: TokenMask | None = None,
    ) -> None:
        """``end_ids``: the model's end-of-sequence tokens. ``mask``: what ``structured_outputs`` was compiled to.

        Raises SamplingParamsError for ids beyond the vocabulary.
        """
        for name, ids in (
            ("banned_token_ids", params.banned_token_ids),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise SamplingParamsError(f"{name} holds token {token}; the vocabulary ends at {vocab_size - 1}")
        self.params = params
        self.seed = params.seed if params.seed is not None else secrets.randbits(64)
        self.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(end_ids))
        self.num_prompt_tokens = len(prompt)
        self._mask = mask
        self._penalises = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._history = History(prompt if params.repetition_penalty != 1 else ())
        self._fit(vocab_size, params.banned_token_ids)

    def _fit(self, vocab_size: int, banned: Iterable[int]) -> None:
        """Lay out bans, bias and end tokens for logits with ``vocab_size`` columns."""
        params = self.params
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
        self.vocab_size = vocab_size
        self._bias_ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self._banned = np.array(sorted({t for t in banned if t < vocab_size}), dtype=np.int64)
        self._ends = np.array(sorted(t for t in self.end_ids if t < vocab_size), dtype=np.int64)
        plain = not (self._penalises or len(self._bias) or len(self._banned) or params.min_tokens or self._mask)
        self.is_argmax = params.greedy and plain
        """Whether the next token is simply the argmax of the raw logits."""

    @property
    def num_output_tokens(self) -> int:
        return self._history.length

    @property
    def position(self) -> int:
        """Index, in the sequence, of the token that comes next."""
        return self.num_prompt_tokens + self._history.length

    def commit(self, token: int) -> None:
        """Record one emitted token."""
        self._history.length += 1
        if self._penalises:
            self._history.append(token)
        if self._mask is not None:
            self._mask.commit(token)

    @cached_property
    def candidates(self) -> CandidateTransform:
        """The same transform on a few tokens at each of several nodes, for drafters."""
        return CandidateTransform(
            self.params,
            self._history,
            self._mask,
            self.vocab_size,
            bias=(self._bias_ids, self._bias),
            banned=self._banned,
            ends=self._ends,
        )

    def logprobs(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """Log-probabilities [V] (float32) of the token that follows ``path``, -inf for those ruled out.

        logits: [V] float32 on the CPU, not changed. path: tokens between the last committed one and this node.
        At temperature 0 the result is a point mass on the argmax, lowest id on ties.
        Raises NonFiniteLogitsError if the logits hold NaN or +inf, or if no token is left.
        """
        import torch

        return torch.from_numpy(self._distribution(logits, path))

    def argmax(self, logits: torch.Tensor, path: Sequence[int] = ()) -> int:
        """The greedy token after ``path``: `logprobs` at temperature 0, without building the distribution."""
        return self.argmax_of_row(logits.detach().numpy(), path)

    def argmax_of_row(self, row: Row, path: Sequence[int] = ()) -> int:
        """`argmax` of logits that are a NumPy array already, so that a greedy round makes no call to PyTorch."""
        return self._adjusted_row(row, path)[1]

    def adjusted(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """Logits [V] after bias, penalties, bans, min_tokens and mask: what temperature 0 takes the argmax of.

        Arguments and errors as for `logprobs`. Shares the memory of ``logits`` where nothing is to be changed.
        """
        import torch

        return torch.from_numpy(self._adjusted(logits, path)[0])

    def _distribution(self, logits: torch.Tensor, path: Sequence[int]) -> Row:
        params = self.params
        x, best = self._adjusted(logits, path)
        if params.greedy:
            point = np.full_like(x, -math.inf)
            point[best] = 0.0
            return point
        x = transform.tempered(x, float(x[best]), params.temperature)
        floor = transform.threshold(x, params.top_k, params.top_p, params.min_p)
        return transform.log_softmax(x) if floor == -math.inf else transform.log_softmax_above(x, floor)

    def _adjusted(self, logits: torch.Tensor, path: Sequence[int]) -> tuple[Row, int]:
        return self._adjusted_row(logits.detach().numpy(), path)

    def _adjusted_row(self, raw: Row, path: Sequence[int]) -> tuple[Row, int]:
        """Logits after bias, penalties, bans, min_tokens and mask, a copy if anything changes, and their argmax."""
        best = int(raw.argmax())
        if not math.isfinite(raw[best]):
            raise NonFiniteLogitsError("the model returned NaN or infinite logits")
        x = raw
        if len(self._bias):
            x = x.copy()
            x[self._bias_ids] += self._bias
        if self._penalises:
            x = self._penalised(x, path)
        for ruled_out in self._ruled_out(path):
            x = x.copy() if x is raw else x
            x[ruled_out] = -math.inf
        if x is raw:
            return x, best
        best = int(x.argmax())
        if not math.isfinite(x[best]):
            raise NoTokenLeftError(
                "no token is left: the grammar, bans, bias, penalties or min_tokens rule all out, or overflow"
            )
        return x, best

    def _ruled_out(self, path: Sequence[int]) -> Iterable[npt.NDArray[np.int64] | npt.NDArray[np.bool_]]:
        """Tokens that cannot follow ``path``, each time as ids or as one truth value a token."""
        if len(self._banned):
            yield self._banned
        if len(self._ends) and self.num_output_tokens + len(path) < self.params.min_tokens:
            yield self._ends
        forbidden = self._mask.forbidden(path) if self._mask is not None else None
        if forbidden is not None:
            yield forbidden

    def _penalised(self, x: Row, path: Sequence[int]) -> Row:
        """A copy of x with the penalties of the committed history and of ``path``."""
        history, params = self._history, self.params
        ids, counts = history.ids, history.counts
        if ids.size and int(ids.max()) >= len(x):
            inside = ids < len(x)
            ids, counts = ids[inside], counts[inside]
        result = x.copy()
        for seen, number in ((ids, counts), history.seen_on(path)):
            result[seen] = transform.penalised(
                x[seen], number, params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            )
        return result
