"""`NativeExecutor`: the Executor contract over the C++ forward pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.core.errors import ConfigError, UnknownNameError
from outrider.executors.base import Dense, Executor, ForwardOutput, Segment, check_features, whole_pages
from outrider.executors.native import default_threads, require
from outrider.executors.shared import shared_tensors
from outrider.models.config import EMBEDDING

if TYPE_CHECKING:
    from outrider import _native
    from outrider.models.config import ModelConfig
    from outrider.models.loader import Model

_DTYPES = ("auto", "bfloat16")
_KV_DTYPES = ("bfloat16", "float32")
_QUANTIZATIONS = ("int8", "int4")
_HEAD_QUANTIZATION = "int4"
"""A learned drafter's weights are out of the cache after each pass of its target, so that reading them is most of what
a draft takes. Next to int8, int4 costs a hundredth of the tokens accepted beyond the first (SmolLM2-135M, EAGLE-3)."""


class NativeExecutor(Executor):
    """Runs a model on the CPU: weights packed, one native call per forward pass, every row bit-identical.

    kv_tokens: rows that the KV cache holds, rounded up to whole pages of ``page_size`` (a multiple of 16). kv_memory:
    bytes that it may take; see `ExecutorFactory`.
    max_context: longest sequence; default: the model's. Never more than what the cache holds.
    threads: default: one per core that this process may use. Results do not depend on it.
    quantization: "int8" or "int4", for float weights; None keeps them as they are (floats as bfloat16).
    dtype: "auto" or "bfloat16": float weights are kept as bfloat16, sums are float32.
    kv_dtype: "bfloat16" or "float32".
    isa: "portable", "avx2", "avx512" or "amx"; default: $OUTRIDER_ISA, or the best that the processor has.
    packed_cache: keep the packed weights of a model file on disk, and take them from there the next time.
    target: for a learned drafter, the executor of its target, whose threads and matrices it shares: see `open_head`.

    Raises ConfigError, UnknownNameError, UnsupportedModelError or, from the weights, ModelFileError.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        kv_tokens: int | None = None,
        kv_memory: int | None = None,
        max_context: int | None = None,
        page_size: int = 16,
        threads: int | None = None,
        quantization: str | None = None,
        kv_dtype: str = "bfloat16",
        isa: str | None = None,
        packed_cache: bool = True,
        target: NativeExecutor | None = None,
    ) -> None:
        require()
        from outrider import _native
        from outrider.executors.native.model import build_model

        config = model.config
        _check_sizes(kv_tokens, page_size, max_context, threads, config.max_position)
        _check_kind(dtype, device, quantization, kv_dtype)
        if target is not None and threads is not None:
            raise ConfigError("a learned drafter runs on its target's threads; leave threads out")
        self.config = config
        self._page_size = page_size
        page_bytes = self.kv_page_bytes(config, page_size=page_size, kv_dtype=kv_dtype)
        self._num_pages = whole_pages(kv_tokens, kv_memory, page_size, page_bytes)
        self._max_context = min(max_context or config.max_position, self.total_tokens)
        self._pool: _native.ThreadPool
        self._pool = target._pool if target is not None else _native.ThreadPool(threads or default_threads())
        self._matrices: Mapping[str, _native.PackedMatrix] = self._pack(model, quantization, packed_cache, target)
        self._session = _native.Session(
            build_model(config, self._matrices, model.weights),
            self._pool,
            pages=self._num_pages,
            page_size=page_size,
            max_context=self._max_context,
            kv_f32=kv_dtype == "float32",
            isa=isa or "",
        )
        self._logits = _LogitsBuffers(config.num_logits)

    @staticmethod
    def kv_page_bytes(
        config: ModelConfig,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        page_size: int = 16,
        kv_dtype: str = "bfloat16",
    ) -> int:
        """See `ExecutorFactory`. The cache has a type of its own, whatever that of the weights."""
        require()
        from outrider import _native

        return _native.kv_page_bytes(
            config.num_layers, config.num_kv_heads, config.head_dim, page_size, kv_dtype == "float32"
        )

    def _pack(
        self, model: Model, quantization: str | None, use_cache: bool, target: NativeExecutor | None
    ) -> Mapping[str, _native.PackedMatrix]:
        """The model's matrices, its target's among them."""
        from outrider.executors.native.cache import load_or_pack

        shared: dict[str, _native.PackedMatrix] = {}
        if target is not None:
            names = shared_tensors(model.config, model.weights, target.config)
            shared = {name: target._matrices.get(name, target._matrices[EMBEDDING]) for name in names}
        packed = load_or_pack(model, quantization, self._pool, use_cache=use_cache, without=shared)
        if quantization is not None:
            self.quantization_error = packed.error(quantization)
        self.weight_bytes = sum(place.layout.bytes for place in packed.places)
        """Bytes of packed matrices of its own; a forward pass reads them once, but for an untied embedding's."""
        return {**packed.matrices(), **shared}

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run."""
        return self._session.isa

    def open(self, pages: Sequence[int] = ()) -> int:
        return self._session.open(list(pages))

    def close(self, seq: int) -> None:
        self._session.close(seq)

    def full_pages(self, seq: int) -> list[int]:
        return self._session.full_pages(seq)

    def retain(self, pages: Sequence[int]) -> None:
        self._session.retain(list(pages))

    def release(self, pages: Sequence[int]) -> None:
        self._session.release(list(pages))

    def forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int] = (), features: torch.Tensor | None = None
    ) -> ForwardOutput:
        check_features(self.config, segments, features)
        counts = [len(segment.tokens) for segment in segments]
        rows: list[int] = []
        start = 0
        for segment, count in zip(segments, counts, strict=True):
            rows.extend(range(start, start + count) if segment.logits is None else _shifted(segment, start))
            start += count
        logits = self._logits.take(len(rows))
        hidden = {layer: np.empty((start, self.config.hidden_size), np.float32) for layer in hidden_layers}
        self._session.forward(
            [segment.seq for segment in segments],
            counts,
            list(chain.from_iterable(segment.tokens for segment in segments)),
            list(chain.from_iterable(segment.parents for segment in segments)),
            rows,
            logits,
            list(hidden.items()),
            None if features is None else features.contiguous().numpy(),
        )
        return ForwardOutput(torch.from_numpy(logits), {i: torch.from_numpy(h) for i, h in hidden.items()})

    def commit(self, seq: int, rows: Sequence[int]) -> None:
        self._session.commit(seq, list(rows))

    def truncate(self, seq: int, length: int) -> None:
        self._session.truncate(seq, length)

    def length(self, seq: int) -> int:
        return self._session.length(seq)

    def pending(self, seq: int) -> int:
        return self._session.pending(seq)

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def free_tokens(self) -> int:
        return self._session.free_pages * self._page_size

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def total_tokens(self) -> int:
        return self._num_pages * self._page_size

    def open_head(self, model: Model, *, kv_tokens: int, max_context: int) -> NativeExecutor:
        return NativeExecutor(
            model,
            kv_tokens=kv_tokens,
            max_context=min(max_context, model.config.max_position),
            page_size=self._page_size,
            quantization=_HEAD_QUANTIZATION if model.weights.are_floats() else None,
            isa=self.isa,
            packed_cache=False,
            target=self,
        )

    def dense(self, weight: torch.Tensor) -> Dense:
        from outrider.executors.native.dense import NativeDense

        return NativeDense(self._session, self._pool, weight)

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, logprobs = np.empty((len(logits), k), np.int64), np.empty((len(logits), k), np.float32)
        self._session.top_k(logits.numpy(), ids, logprobs)
        return torch.from_numpy(ids), torch.from_numpy(logprobs)

    def check_integrity(self) -> None:
        self._session.check_integrity()

    def read_kv(self, seq: int, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Keys and values of a layer, [length + pending, kv_heads * head_dim] each, in order of writing. For tests."""
        shape = (self.length(seq) + self.pending(seq), self.config.num_kv_heads * self.config.head_dim)
        keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._session.read_kv(seq, layer, keys, values)
        return keys, values


def _shifted(segment: Segment, start: int) -> list[int]:
    """The segment's rows that need logits, numbered through the whole forward pass."""
    wanted = segment.logits or ()
    if wanted and not 0 <= min(wanted) <= max(wanted) < len(segment.tokens):
        raise ConfigError(f"sequence {segment.seq}: rows that need logits must be below {len(segment.tokens)}")
    return [start + row for row in wanted]


def _check_sizes(
    kv_tokens: int | None, page_size: int, max_context: int | None, threads: int | None, max_position: int
) -> None:
    for name, value in (
        ("kv_tokens", kv_tokens),
        ("page_size", page_size),
        ("max_context", max_context),
        ("threads", threads),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if max_context is not None and max_context > max_position:
        raise ConfigError(f"max_context={max_context} is more than the model's {max_position} positions")


def _check_kind(dtype: str, device: str, quantization: str | None, kv_dtype: str) -> None:
    if str(device) != "cpu":
        raise ConfigError(f"the native executor runs on the CPU, not on device {device!r}; use the executor 'torch'")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"the native executor takes dtype {' or '.join(_DTYPES)}, not {dtype!r}; use the executor 'torch'"
        )
    if quantization is not None and quantization not in _QUANTIZATIONS:
        raise UnknownNameError("quantization", quantization, _QUANTIZATIONS)
    if kv_dtype not in _KV_DTYPES:
        raise UnknownNameError("kv_dtype", kv_dtype, _KV_DTYPES)


class _LogitsBuffers:
    """Memory for logits, used again once nobody holds it.

    At a vocabulary of 150,000 the logits of 16 rows are 10 MB; fresh memory would be mapped and cleared by the system
    in every round. Whoever holds logits, or a view of them, holds a reference to the array they lie in.
    """

    _KEPT = 4

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._arrays: list[npt.NDArray[np.float32]] = []

    def take(self, rows: int) -> npt.NDArray[Any]:
        """An array [rows, V] of floats, whatever they were."""
        for i in range(len(self._arrays)):
            # Two references: the list's and the call's own.
            if len(self._arrays[i]) >= rows and sys.getrefcount(self._arrays[i]) == 2:
                self._arrays.insert(0, self._arrays.pop(i))
                return self._arrays[0][:rows]
        array = np.empty((max(8, 1 << (rows - 1).bit_length()), self._vocab_size), np.float32)
        self._arrays.insert(0, array)
        del self._arrays[self._KEPT :]
        return array[:rows]
