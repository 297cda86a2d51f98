"""How the bytes of ``kv_cache_memory`` are shared by all executors that keep KV, the target's and drafters'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.executors.base import Executor
    from outrider.models.config import ModelConfig
    from outrider.models.loader import Model


class KVMemory:
    """Gives every KV cache the same number of pages, since drafters keep the very tokens that the target does.

    An executor that nothing refers to any more has given its bytes back.
    """

    def __init__(self, limit: int, page_bytes: Callable[[ModelConfig], int], configs: Sequence[ModelConfig]) -> None:
        """limit: bytes. configs: of the models that are to be opened, the target first.

        Raises ConfigError if a page of each does not fit.
        """
        together = sum(page_bytes(config) for config in configs)
        if limit < together:
            drafters = f" for the target and {len(configs) - 1} of its drafters" if len(configs) > 1 else ""
            raise ConfigError(
                f"kv_cache_memory={limit} does not hold one page of KV{drafters}: {together} bytes are needed; raise it"
            )
        self._limit = limit
        self._pages = limit // together
        self._page_bytes = page_bytes
        self._open: WeakSet[Executor] = WeakSet()

    def bytes_of(self, config: ModelConfig) -> int:
        """What the KV cache of such a model takes."""
        return self._pages * self._page_bytes(config)

    def open(self, model: Model, open_executor: Callable[[], Executor]) -> Executor:
        """The executor of ``model`` that ``open_executor`` returns. Raises ConfigError if its KV does not fit."""
        need = self.bytes_of(model.config)
        left = self._limit - sum(self.bytes_of(executor.config) for executor in self._open)
        if need > left:
            raise ConfigError(
                f"the KV cache of {model.name} takes {need} bytes, and of kv_cache_memory={self._limit} only {left} "
                "are left; it was divided among what the LLM was made for, so name this drafter there, in "
                "speculative_config or reserve_for"
            )
        executor = open_executor()
        self._open.add(executor)
        return executor
