"""A model that is loaded and ready: what engines with different speculation share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.acceptance import RULES
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.drafters import assemble, kv_configs
from outrider.drafters.base import DrafterContext, OpenExecutor
from outrider.drafters.health import AcceptanceWatch
from outrider.drafters.read_once import ReadOnce
from outrider.engine.engine import Engine
from outrider.engine.kv_memory import KVMemory
from outrider.engine.names import check_names
from outrider.engine.planner import Planner
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.price import ForwardPrice
from outrider.engine.speculators import Speculators
from outrider.executors import EXECUTORS, choose_executor

if TYPE_CHECKING:
    import torch

    from outrider.core.config import SpeculativeConfig
    from outrider.drafters.base import Drafter
    from outrider.executors.base import CostCurve, Dense, Executor
    from outrider.models.config import ModelConfig
    from outrider.models.loader import Model

DEFAULT_CONTEXT = 8192
_GLANCE = 0.25
"""Seconds that somebody's first draft waits for prices. What is not measured then is learned from the rounds."""
_DEFAULT_FULL_CONTEXTS = 4


class Runtime:
    """Model and executor, and the recipe by which executors of drafters are opened.

    The KV cache has the size that is configured; else it holds a few sequences of full length, or all of a small batch.
    ``config.kv_cache_memory`` is for the KV of drafters too: of those that ``speculative`` names, a KV cache each.
    """

    def __init__(
        self,
        model: Model,
        *,
        executor: str,
        dtype: str,
        device: str,
        quantization: str | None,
        threads: int | None,
        config: EngineConfig,
        speculative: Sequence[SpeculativeConfig] = (),
    ) -> None:
        self.model = model
        self.config = config
        self.executor_name = choose_executor(executor, dtype=dtype, device=device)
        self._dtype = dtype
        self._device = device
        self._quantization = quantization
        self._threads = threads
        limit = model.config.max_position
        if config.max_context is not None and config.max_context > limit:
            raise ConfigError(f"max_context={config.max_context} is more than the model's {limit}; lower it")
        self.max_context = config.max_context or min(limit, DEFAULT_CONTEXT)
        self._kv_tokens = config.kv_tokens
        if config.kv_cache_memory is None and config.kv_tokens is None:
            self._kv_tokens = min(config.max_batch_size, _DEFAULT_FULL_CONTEXTS) * (self.max_context + 64)
        self._read = ReadOnce()
        self._kv_memory = None if config.kv_bytes is None else self._divided(config.kv_bytes, speculative)
        self.executor = self._open(model, self._kv_tokens)
        if config.max_context is not None and self.executor.max_context < config.max_context:
            raise ConfigError(
                f"max_context={config.max_context} does not fit a KV cache of {self.executor.total_tokens} tokens; "
                "lower it, or raise kv_tokens or kv_cache_memory"
            )
        self.max_context = self.executor.max_context
        self.prefix_cache = PrefixCache(self.executor, enabled=config.enable_prefix_caching)
        self._cost_curve: CostCurve | None = None

    def open_executor(self, model: Model, *, quantize: bool = True) -> Executor:
        """An executor of this runtime's kind for a drafter's model, whose KV holds as many tokens as the target's.

        quantize: whether `quantization` is for this model too. Raises ConfigError if `kv_cache_memory` has no room.
        """
        return self._open(model, self.executor.total_tokens, quantize=quantize)

    def open_head(self, model: Model) -> Executor:
        """The same for a model that reads the target's hidden states: see `Executor.open_head`."""
        target = self.executor
        sizes = {"kv_tokens": target.total_tokens, "max_context": self.max_context}
        return self._within_memory(model, lambda: target.open_head(model, **sizes))

    def _open(self, model: Model, kv_tokens: int | None, *, quantize: bool = True) -> Executor:
        def opened() -> Executor:
            return EXECUTORS.get(self.executor_name)(
                model,
                dtype=self._dtype,
                device=self._device,
                quantization=self._quantization if quantize else None,
                threads=self._threads,
                kv_tokens=kv_tokens,
                kv_memory=None if self._kv_memory is None else self._kv_memory.bytes_of(model.config),
                max_context=min(self.max_context, model.config.max_position),
            )

        return self._within_memory(model, opened)

    def _within_memory(self, model: Model, opened: Callable[[], Executor]) -> Executor:
        return opened() if self._kv_memory is None else self._kv_memory.open(model, opened)

    def _divided(self, limit: int, speculative: Sequence[SpeculativeConfig]) -> KVMemory:
        factory = EXECUTORS.get(self.executor_name)

        def page_bytes(config: ModelConfig) -> int:
            return factory.kv_page_bytes(config, dtype=self._dtype, device=self._device)

        drafters = [config for own in speculative for config in kv_configs(self._context(own))]
        return KVMemory(limit, page_bytes, [self.model.config, *drafters])

    def _context(self, config: SpeculativeConfig) -> DrafterContext:
        return DrafterContext(config, self.model, _OpenAlike(self), self._read)

    @property
    def cost_curve(self) -> CostCurve:
        """Measured when first asked for, then kept."""
        if self._cost_curve is None:
            self._cost_curve = self.executor.measure_cost()
        return self._cost_curve

    def _prices(self) -> CostCurve:
        """What a planner starts with: the measured curve if there is one, else the beginning of one."""
        return self._cost_curve or self.executor.measure_cost(context=16, patience=_GLANCE)

    def engine(self, config: SpeculativeConfig, wrap: Callable[[Drafter], Drafter] | None = None) -> Engine:
        """An engine over this runtime that speculates as ``config`` says, unless a request says otherwise.

        wrap: see `LLM.with_speculation`.
        """
        check_names(config)
        rule = RULES.get(config.acceptance)(config)
        if not rule.trees:
            config = replace(config, tree_width=1)
        context = self._context(config)
        made: dict[str, Drafter] = {}
        drafter = assemble(config.members, context, made)
        speculators = Speculators(
            drafter if wrap is None else wrap(drafter),
            config,
            lambda members: assemble(members, context, made, load_models=False),
            chains_only=not rule.trees,
        )
        planner = Planner(ForwardPrice(self._prices), adaptive=config.adaptive)
        return Engine(
            self.model, self.executor, self.prefix_cache, speculators, rule, planner, AcceptanceWatch(), self.config
        )


class _OpenAlike(OpenExecutor):
    """For drafters' models. ``quantization`` is asked of the target; a draft model follows if its weights are floats.
    One that comes quantised is as small as its makers wanted it.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self, model: Model) -> Executor:
        return self._runtime.open_executor(model, quantize=model.weights.are_floats())

    def head(self, model: Model) -> Executor:
        return self._runtime.open_head(model)

    def dense(self, weight: torch.Tensor) -> Dense:
        return self._runtime.executor.dense(weight)

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._runtime.executor.top_k(logits, k)
