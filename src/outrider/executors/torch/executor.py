"""`TorchExecutor`: the Executor contract over a paged KV cache and plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from outrider.core.errors import ConfigError, ContextLengthError, UsageError
from outrider.executors.base import COMMITTED, Dense, Executor, ForwardOutput, Segment, check_features, whole_pages
from outrider.executors.torch.attention import SegmentPlan, causal_mask
from outrider.executors.torch.dtype import resolve_device, resolve_dtype
from outrider.executors.torch.kv import KVCache, SequenceKV
from outrider.executors.torch.model import Batch, TorchModel
from outrider.executors.torch.products import COLUMN_MULTIPLE, TorchDense, arithmetic_of, round_up
from outrider.executors.torch.tree import order_tree
from outrider.models.config import ModelConfig
from outrider.models.loader import Model


class TorchExecutor(Executor):
    """Runs a model with plain PyTorch.

    On CPUs it was observed that a row's logits do not depend, to the bit, on what else a forward pass holds or on how
    the prefix came about; see `outrider.executors.torch.products` for how far that goes.

    dtype: a torch.dtype, its name, or "auto" (see `resolve_dtype`). kv_tokens: rows that the KV cache holds, rounded up
    to whole pages of ``page_size``. kv_memory: bytes that it may take; see `ExecutorFactory`.
    max_context: longest sequence; default: the model's. Never more than what the cache holds.
    threads: PyTorch's own, for the whole process; None leaves them alone. quantization: not supported.
    target: for a learned drafter, the executor of its target: see `open_head`.
    Raises ConfigError, UnknownNameError, UnsupportedModelError or, from the weights, ModelFileError.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        kv_tokens: int | None = None,
        kv_memory: int | None = None,
        max_context: int | None = None,
        page_size: int = 16,
        quantization: str | None = None,
        threads: int | None = None,
        target: TorchExecutor | None = None,
    ) -> None:
        config = model.config
        if quantization is not None:
            raise ConfigError(f"the torch executor does not quantise ({quantization!r}); use the executor 'native'")
        for name, value in (
            ("kv_tokens", kv_tokens),
            ("page_size", page_size),
            ("max_context", max_context),
            ("threads", threads),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if max_context is not None and max_context > config.max_position:
            raise ConfigError(f"max_context={max_context} is more than the model's {config.max_position} positions")
        if threads is not None:
            torch.set_num_threads(threads)
        self.config = config
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        page_bytes = self.kv_page_bytes(config, dtype=self.dtype, device=self.device, page_size=page_size)
        self._cache = KVCache(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            pages=whole_pages(kv_tokens, kv_memory, page_size, page_bytes),
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )
        self._max_context = min(max_context or config.max_position, self.total_tokens)
        shared: TorchModel | None = target._model if target is not None else None
        self._model: TorchModel = TorchModel(config, model.weights, self.dtype, self.device, self._max_context, shared)

    @staticmethod
    def kv_page_bytes(
        config: ModelConfig,
        *,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        page_size: int = 16,
    ) -> int:
        """See `ExecutorFactory`."""
        number_bytes = resolve_dtype(dtype, resolve_device(device)).itemsize
        return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * number_bytes

    def open(self, pages: Sequence[int] = ()) -> int:
        return self._cache.open(pages)

    def close(self, seq: int) -> None:
        self._cache.close(seq)

    def full_pages(self, seq: int) -> list[int]:
        return self._cache.full_pages(self._cache[seq])

    def retain(self, pages: Sequence[int]) -> None:
        self._cache.retain(pages)

    def release(self, pages: Sequence[int]) -> None:
        self._cache.release(pages)

    def forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int] = (), features: torch.Tensor | None = None
    ) -> ForwardOutput:
        check_features(self.config, segments, features)
        added = self._check(segments, hidden_layers)
        self._cache.reserve([(self._cache[s.seq], len(s.tokens)) for s in segments])
        for segment, depths in zip(segments, added, strict=True):
            self._cache[segment.seq].parents.extend(segment.parents)
            self._cache[segment.seq].depths.extend(depths)
        try:
            with torch.inference_mode():
                batch = self._batch(segments, features)
                logits, hidden = self._model.forward(batch, self._cache.data, hidden_layers)
            # Copies made outside of inference mode are ordinary tensors, which may be changed and trained on.
            rows = {layer: x.clone() for layer, x in hidden.items()}
            return ForwardOutput(logits.to("cpu", torch.float32, copy=True), rows)
        except BaseException:
            self._forget(segments)
            raise

    def commit(self, seq: int, rows: Sequence[int]) -> None:
        state = self._cache[seq]
        parent = COMMITTED
        for row in rows:
            if not 0 <= row < state.pending:
                raise UsageError(f"cannot commit row {row}: sequence {seq} has {state.pending} pending rows")
            if state.parents[row] != parent:
                raise UsageError(f"cannot commit {list(rows)}: the parent of row {row} is {state.parents[row]}")
            parent = row
        self._cache.commit(state, rows)

    def truncate(self, seq: int, length: int) -> None:
        state = self._cache[seq]
        if not 0 <= length <= state.length:
            raise UsageError(f"cannot truncate sequence {seq} to {length} tokens: it has {state.length}")
        if not self._cache.may_end_at(state, length):
            raise UsageError(
                f"cannot truncate sequence {seq} to {length} tokens: that lies in a page that others share"
            )
        self._cache.truncate(state, length)

    def length(self, seq: int) -> int:
        return self._cache[seq].length

    def pending(self, seq: int) -> int:
        return self._cache[seq].pending

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def free_tokens(self) -> int:
        return self._cache.free_pages * self.page_size

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    @property
    def total_tokens(self) -> int:
        return self._cache.num_pages * self.page_size

    def open_head(self, model: Model, *, kv_tokens: int, max_context: int) -> TorchExecutor:
        return TorchExecutor(
            model,
            dtype=self.dtype,
            device=self.device,
            kv_tokens=kv_tokens,
            max_context=min(max_context, model.config.max_position),
            page_size=self.page_size,
            target=self,
        )

    def dense(self, weight: torch.Tensor) -> Dense:
        return TorchDense(weight.to(self.device, self.dtype))

    def check_integrity(self) -> None:
        self._cache.check_integrity()

    def _check(self, segments: Sequence[Segment], hidden_layers: Sequence[int]) -> list[list[int]]:
        """Depths of the new rows of each segment. Raises UsageError or ContextLengthError; changes nothing."""
        if not segments:
            raise UsageError("a forward pass needs at least one segment")
        if len({segment.seq for segment in segments}) < len(segments):
            raise UsageError("a forward pass takes at most one segment a sequence")
        for layer in hidden_layers:
            if not 0 <= layer <= self.config.num_layers:
                raise UsageError(
                    f"hidden layer {layer} does not exist; the model has layers 0 to {self.config.num_layers}"
                )
        return [self._check_segment(segment, self._cache[segment.seq]) for segment in segments]

    def _check_segment(self, segment: Segment, state: SequenceKV) -> list[int]:
        tokens, where = segment.tokens, f"sequence {segment.seq}"
        if not tokens or len(segment.parents) != len(tokens):
            raise UsageError(
                f"{where}: {len(tokens)} tokens and {len(segment.parents)} parents; need one parent a token"
            )
        if not 0 <= min(tokens) <= max(tokens) < self.config.vocab_size:
            raise UsageError(f"{where}: a token id lies outside the vocabulary of {self.config.vocab_size}")
        wanted = segment.logits
        if wanted is not None:
            ascending = all(a < b for a, b in pairwise(wanted))
            if not ascending or (wanted and not 0 <= wanted[0] <= wanted[-1] < len(tokens)):
                raise UsageError(f"{where}: rows that need logits must be ascending and below {len(tokens)}")
        depths = list(state.depths)
        for row, parent in enumerate(segment.parents, start=state.pending):
            if not COMMITTED <= parent < row:
                raise UsageError(f"{where}: row {row} has parent {parent}; a parent is an earlier pending row, or -1")
            depths.append(0 if parent == COMMITTED else depths[parent] + 1)
        if state.length + max(depths) >= self.max_context:
            raise ContextLengthError(
                f"{where} would reach {state.length + max(depths) + 1} tokens, and the context is {self.max_context}"
            )
        return depths[state.pending :]

    def _batch(self, segments: Sequence[Segment], features: torch.Tensor | None) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        plans: list[SegmentPlan] = []
        for segment in segments:
            state = self._cache[segment.seq]
            rows = slice(len(tokens), len(tokens) + len(segment.tokens))
            tokens.extend(segment.tokens)
            positions.extend(state.length + depth for depth in state.depths[-len(segment.tokens) :])
            wanted = range(len(segment.tokens)) if segment.logits is None else segment.logits
            logit_rows.extend(rows.start + row for row in wanted)
            plans.append(self._plan(state, rows, torch.tensor(positions[rows])))
        return Batch(tokens, positions, plans, logit_rows, features)

    def _plan(self, state: SequenceKV, rows: slice, positions: torch.Tensor) -> SegmentPlan:
        """Plan the segment whose rows are the last pending ones of ``state``."""
        stop = state.length + state.pending
        first = state.pending - len(positions)
        in_order = state.parents == list(range(-1, state.pending - 1))
        # A tree needs one column, the last, that is no row's.
        columns = round_up(int(positions.max()) + (1 if in_order else 2), COLUMN_MULTIPLE)
        arithmetic = arithmetic_of(self.dtype)
        tree = None
        if not in_order:
            tree = order_tree(state, range(first, state.pending), columns, arithmetic, self.device)
        positions = positions.to(self.device)
        mask = causal_mask(positions, columns, None)
        window = self.config.sliding_window
        kv_heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        return SegmentPlan(
            rows=rows,
            written=self._cache.slots(state, state.length + first, stop),
            read=self._cache.slots(state, 0, stop),
            tree=tree,
            mask=mask,
            window_mask=mask if window is None else causal_mask(positions, columns, window),
            edges=[*range(0, columns, arithmetic.block), columns],
            gathered=self._cache.data.new_zeros(2, kv_heads, round_up(stop, COLUMN_MULTIPLE), head_dim),
        )

    def _forget(self, segments: Sequence[Segment]) -> None:
        """Take back the pending rows of a forward pass that failed."""
        for segment in segments:
            state = self._cache[segment.seq]
            del state.parents[-len(segment.tokens) :], state.depths[-len(segment.tokens) :]
            self._cache.trim(state)
