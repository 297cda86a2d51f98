"""The Executor contract: run the model over rows of many sequences, and keep their KV.

A sequence in an executor is a *committed prefix* plus *pending rows*. `forward` appends pending rows; each of them sees
the committed prefix and its chain of pending ancestors, nothing else. `commit` turns one path of pending rows into
prefix and forgets the rest, so rejected KV can never be read again. Prefill, plain decoding, verification of a tree and
the level-by-level growth of a draft tree are all this one operation.

KV lies in pages. A page that committed tokens fill never changes again and may be shared: `open` starts a sequence over
such pages, and `retain` keeps them when the sequence that wrote them is closed. Which text a page stands for is the
caller's business; the executor counts references, and a page is free when nobody holds it.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outrider.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch

    from outrider.models.config import ModelConfig
    from outrider.models.loader import Model

_MEASURING_SECONDS = 1.0
_ENOUGH_ROWS = 16
"""Rows that are timed in any case: what one request's trees, or a small batch, take."""

COMMITTED = -1
"""Parent of a row that follows the committed prefix directly."""


@dataclass(frozen=True)
class Segment:
    """The rows that one forward pass adds to one sequence.

    seq: handle from `Executor.open`.
    tokens: token id of each row.
    parents: for each row COMMITTED, or the number of its parent among the sequence's pending rows. Pending rows are
        numbered in the order in which they were forwarded since the last commit: with p rows pending already, the
        rows of this segment are p, p+1, …
    logits: which rows of this segment (0 … len(tokens)-1, ascending) need logits; None: all of them.
    """

    seq: int
    tokens: Sequence[int]
    parents: Sequence[int]
    logits: Sequence[int] | None = None

    @classmethod
    def chain(cls, seq: int, tokens: Sequence[int], logits: Sequence[int] | None = None) -> Segment:
        """Rows that follow one another after the committed prefix (no row may be pending)."""
        return cls(seq, tokens, range(-1, len(tokens) - 1), logits)

    @property
    def num_logits(self) -> int:
        return len(self.tokens) if self.logits is None else len(self.logits)


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward pass returns, rows in the order of the segments.

    logits: [L, V] float32 on the CPU, the rows asked for.
    hidden: layer -> [R, H], all rows, in the executor's dtype. Layer i is the residual stream after i blocks: 0 is the
        embedding (what fusion made of it, if there is one), num_layers the last block's output before the final norm.
    """

    logits: torch.Tensor
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CostCurve:
    """Seconds of one forward pass by number of rows, as measured."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class QuantizationError:
    """What quantising float weights at load did to them. Errors are relative, by Frobenius norm: 0.01 is one percent.

    kind: "int8" or "int4". relative: root mean square over all matrices, each weighed by its size. worst: the largest
    of a single matrix, which is ``worst_tensor``.
    """

    kind: str
    relative: float
    worst: float
    worst_tensor: str

    def __str__(self) -> str:
        return (
            f"quantised to {self.kind}: relative error {self.relative:.3g} (root mean square), "
            f"worst tensor {self.worst_tensor} with {self.worst:.3g}"
        )


class ExecutorFactory(Protocol):
    """How every executor is built. An option that an executor cannot honour raises ConfigError.

    kv_tokens: tokens that the KV cache holds, rounded up to whole pages. kv_memory: bytes that it may take; the smaller
    of the two counts, and one of them must be given. A page that does not fit raises ConfigError.
    quantization: "int8" or "int4" for float weights, None for weights as they are. threads: None for one per core.
    """

    def __call__(
        self,
        model: Model,
        *,
        dtype: str,
        device: str,
        kv_tokens: int | None,
        kv_memory: int | None,
        max_context: int | None,
        quantization: str | None,
        threads: int | None,
    ) -> Executor: ...

    def kv_page_bytes(self, config: ModelConfig, *, dtype: str, device: str) -> int:
        """Bytes of one page of the KV cache that is opened for such a model, or such a head of its target."""


class Dense(Protocol):
    """x [R, k] -> [R, n], both float32 on the CPU. A row's result does not depend on how many others there are."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def check_features(config: ModelConfig, segments: Sequence[Segment], features: torch.Tensor | None) -> None:
    """Raise UsageError unless ``features`` are what a forward pass of such a model takes: see `Executor.forward`."""
    if (features is None) != (config.fusion is None):
        raise UsageError("a model with fusion takes a feature for each row, and no other model takes any")
    if features is None:
        return
    shape = (sum(len(segment.tokens) for segment in segments), config.hidden_size)
    if tuple(features.shape) != shape:
        raise UsageError(f"features have shape {tuple(features.shape)}; {shape} is expected")
    _check_float32(features, "features")


def check_rows(x: torch.Tensor, k: int) -> None:
    """Raise UsageError unless ``x`` is what a `Dense` with a matrix [n, k] takes."""
    if x.dim() != 2 or x.shape[1] != k:
        raise UsageError(f"the rows have shape {tuple(x.shape)}; (rows, {k}) is expected")
    _check_float32(x, "the rows")


def _check_float32(x: torch.Tensor, what: str) -> None:
    if str(x.dtype) != "torch.float32" or x.device.type != "cpu":
        raise UsageError(f"{what} are {x.dtype} on {x.device}; float32 on the CPU is expected")


def whole_pages(kv_tokens: int | None, kv_memory: int | None, page_size: int, page_bytes: int) -> int:
    """Pages of a KV cache of that many tokens and that much memory at most; see `ExecutorFactory`."""
    if kv_tokens is None and kv_memory is None:
        raise ConfigError("a KV cache needs kv_tokens or kv_memory")
    if kv_memory is not None and kv_memory < page_bytes:
        raise ConfigError(f"kv_memory={kv_memory} does not hold one page of {page_bytes} bytes; raise it")
    sizes = [-(-kv_tokens // page_size)] if kv_tokens is not None else []
    return min([*sizes, kv_memory // page_bytes] if kv_memory is not None else sizes)


class Executor(ABC):
    """Runs one model. Not thread-safe. Knows nothing of sampling, acceptance or drafters."""

    config: ModelConfig
    quantization_error: QuantizationError | None = None
    """Of the quantisation at load; None if nothing was quantised then."""

    @abstractmethod
    def open(self, pages: Sequence[int] = ()) -> int:
        """A new sequence, empty or with the full pages ``pages`` as its prefix; returns its handle.

        Raises UsageError for a page that is neither retained nor a full page of an open sequence.
        """

    @abstractmethod
    def close(self, seq: int) -> None:
        """Drop a sequence, and free those of its pages that nobody else holds."""

    @abstractmethod
    def full_pages(self, seq: int) -> list[int]:
        """The pages that the committed prefix fills, in order; tokens behind the last of them lie in none."""

    @abstractmethod
    def retain(self, pages: Sequence[int]) -> None:
        """Hold one more reference to each of these full pages, whatever becomes of sequences. Raises as `open`."""

    @abstractmethod
    def release(self, pages: Sequence[int]) -> None:
        """Give back one `retain` of each of these pages. Raises UsageError for one that is not retained."""

    @abstractmethod
    def forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int] = (), features: torch.Tensor | None = None
    ) -> ForwardOutput:
        """Append the segments' rows as pending rows and run the model over them.

        features: [R, H] float32 on the CPU, one for each row, for a model whose configuration has `fusion`, and for no
        other (UsageError). At most one segment a sequence. Raises KVCacheFullError if pages run out and
        ContextLengthError if a row would lie beyond the context; nothing has changed then.
        """

    @abstractmethod
    def commit(self, seq: int, rows: Sequence[int]) -> None:
        """Make the pending rows ``rows`` part of the prefix, in this order, and drop every other pending row.

        ``rows`` is a path: the first one's parent is COMMITTED, each other one's parent is the one before it. Empty:
        drop all pending rows.
        """

    @abstractmethod
    def truncate(self, seq: int, length: int) -> None:
        """Shorten the committed prefix to ``length`` tokens and drop all pending rows.

        Raises UsageError if ``length`` lies inside a page that others hold too: what follows would be written over it.
        """

    @abstractmethod
    def length(self, seq: int) -> int:
        """Tokens in the committed prefix."""

    @abstractmethod
    def pending(self, seq: int) -> int:
        """Number of pending rows."""

    @property
    @abstractmethod
    def max_context(self) -> int:
        """Longest sequence, pending rows included by their depth."""

    @property
    @abstractmethod
    def free_tokens(self) -> int:
        """Rows that whole free pages can still take."""

    @property
    @abstractmethod
    def page_size(self) -> int:
        """Tokens in one page of the KV cache; sequences take memory in this unit."""

    @property
    @abstractmethod
    def total_tokens(self) -> int:
        """Rows that the whole KV cache can take."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if pages are lost, counted wrongly, or shared where one may write. For tests."""

    def open_head(self, model: Model, *, kv_tokens: int, max_context: int) -> Executor:
        """An executor of this kind, on the same threads or device, for a learned drafter of this executor's model.

        What ``model.weights`` lacks of the embedding ("model.embed_tokens.weight") and of the output matrix
        ("lm_head.weight") is this model's own, and its memory is shared. Float matrices are kept in the form in which
        they are fast: quantised, by the native executor. Its context is ``max_context``, or its configuration's if that
        is shorter.
        Raises as the constructor does.
        """
        raise ConfigError(f"{type(self).__name__} runs no learned drafters; use the executor 'native' or 'torch'")

    def dense(self, weight: torch.Tensor) -> Dense:
        """A product with a matrix [n, k] of floats that is kept where and how this executor's products are fast.

        Raises UsageError for a weight that it cannot take: the native executor needs a k that is a multiple of 32.
        """
        raise ConfigError(f"{type(self).__name__} runs no learned drafters; use the executor 'native' or 'torch'")

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k most likely tokens of each row of logits [R, V], best first, and their log-probabilities, [R, k]."""
        values, ids = logits.topk(k)
        return ids, values - logits.logsumexp(-1, keepdim=True)

    def measure_cost(
        self,
        rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
        context: int = 64,
        repeats: int = 3,
        patience: float = math.inf,
    ) -> CostCurve:
        """Time forward passes of a scratch sequence: the price list that the planner works from.

        Row counts beyond what the cache or the context can take are left out. Interleaved, medians; made monotone. What
        takes long is repeated less often: its noise is smaller too. patience: seconds after which passes of more than
        16 rows are left out as well, and nothing is repeated.
        """
        context = min(context, self.max_context // 2, self.free_tokens // 2)
        rows = [n for n in rows if context + n + self.page_size <= min(self.free_tokens, self.max_context)] or [1]
        times: dict[int, list[float]] = {n: [] for n in rows}
        seq = self.open()
        try:
            if context:
                segment = Segment.chain(seq, [0] * context, logits=[context - 1])
                self.forward([segment], features=self._no_features(context))
                self.commit(seq, range(context))
            self._timed(seq, max(n for n in rows if n <= max(_ENOUGH_ROWS, rows[0])))
            start = time.perf_counter()
            for turn in range(repeats):
                if turn and time.perf_counter() - start > min(patience, _MEASURING_SECONDS):
                    break
                for n in rows:
                    if n <= _ENOUGH_ROWS or time.perf_counter() - start <= patience:
                        times[n].append(self._timed(seq, n))
        finally:
            self.close(seq)
        seconds: list[float] = []
        rows = [n for n in rows if times[n]]
        for n in rows:
            seconds.append(max(statistics.median(times[n]), seconds[-1] if seconds else 0.0))
        return CostCurve(tuple(rows), tuple(seconds))

    def _timed(self, seq: int, rows: int) -> float:
        features = self._no_features(rows)
        start = time.perf_counter()
        self.forward([Segment.chain(seq, [0] * rows)], features=features)
        seconds = time.perf_counter() - start
        self.commit(seq, ())
        return seconds

    def _no_features(self, rows: int) -> torch.Tensor | None:
        """Zeros for features, if the model takes any."""
        if self.config.fusion is None:
            return None
        import torch

        return torch.zeros(rows, self.config.hidden_size)
