"""`LLM`: a model to generate text with, as a Python object."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from outrider.core.config import EngineConfig, SpeculativeConfig, as_speculative_config
from outrider.core.errors import ConfigError, UsageError
from outrider.core.sampling import SamplingParams
from outrider.core.tenants import DEFAULT_TENANT
from outrider.engine.interrupt import deferred_interrupt
from outrider.engine.names import check_names
from outrider.engine.runtime import Runtime
from outrider.models.loader import Model, load_model

if TYPE_CHECKING:
    from outrider.drafters.base import Drafter
    from outrider.engine.engine import Engine
    from outrider.engine.outputs import Delta, RequestOutput
    from outrider.engine.request import Request
    from outrider.executors.base import CostCurve, Executor, QuantizationError
    from outrider.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


class LLM:
    """A model, an executor and a way to speculate. Not thread-safe.

    >>> llm = LLM("smollm2-135m", speculative_config={"method": "suffix"})
    >>> llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text
    """

    def __init__(
        self,
        model: str | Model,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        *,
        executor: str = "auto",
        dtype: str = "auto",
        device: str = "cpu",
        quantization: str | None = None,
        threads: int | None = None,
        engine_config: EngineConfig | None = None,
        reserve_for: Sequence[SpeculativeConfig | Mapping[str, Any] | str] = (),
    ) -> None:
        """model: an alias, a path, a hub id, or a `Model`. speculative_config: see `SpeculativeConfig`; a method's name
        alone will do; None is ``auto``. executor: "native" (kernels for CPUs), "torch", or "auto": the native one where
        it can run. dtype: "auto", "float32", "bfloat16" or "float16"; anything but "auto" is for the torch executor.
        quantization: "int8" or "int4", to quantise float weights at load (native). threads: default: one per core.
        reserve_for: what else `with_speculation` will be given, to be kept side by side, so that ``kv_cache_memory``
        has room for the KV of those drafters too. Without that limit nothing has to be set aside.

        Raises a UsageError (unknown name, bad value, broken file) with one clear line.
        """
        config = as_speculative_config(speculative_config)
        every = [config, *map(as_speculative_config, reserve_for)]
        for each in every:
            check_names(each, executor)
        loaded = load_model(model) if isinstance(model, str) else model
        runtime = Runtime(
            loaded,
            executor=executor,
            dtype=dtype,
            device=device,
            quantization=quantization,
            threads=threads,
            config=engine_config or EngineConfig(),
            speculative=every,
        )
        if runtime.executor.quantization_error is not None:
            log.info("%s: %s", loaded.name, runtime.executor.quantization_error)
        self._attach(runtime, config)

    def _attach(
        self, runtime: Runtime, config: SpeculativeConfig, wrap: Callable[[Drafter], Drafter] | None = None
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._engine: Engine = runtime.engine(config, wrap)

    def with_speculation(
        self,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None,
        wrap: Callable[[Drafter], Drafter] | None = None,
    ) -> LLM:
        """Another LLM over the same weights and KV cache that speculates differently. Use one at a time.

        Its drafters open KV caches of their own beside those of this LLM's. Under ``kv_cache_memory`` there is room for
        them if they are in ``reserve_for``, or if those they come in place of are no longer in use; else ConfigError.
        wrap: takes the drafter that the configuration names and returns the one to use in its place, for audits and
        experiments.
        """
        sibling = LLM.__new__(LLM)
        sibling._attach(self._runtime, as_speculative_config(speculative_config), wrap)
        return sibling

    @property
    def model(self) -> Model:
        return self._runtime.model

    @property
    def executor(self) -> Executor:
        return self._runtime.executor

    @property
    def engine(self) -> Engine:
        """The engine, for whoever runs its rounds: requests that come and go, with tenant, priority and speculation."""
        return self._engine

    @property
    def executor_name(self) -> str:
        """Which executor runs the model: "native" or "torch"."""
        return self._runtime.executor_name

    @property
    def speculative_config(self) -> SpeculativeConfig:
        return self._config

    @property
    def quantization_error(self) -> QuantizationError | None:
        """What ``quantization`` did to the target's weights; None if they were taken as they are."""
        return self.executor.quantization_error

    @property
    def cost_curve(self) -> CostCurve:
        """Seconds of a forward pass by number of rows, as measured on this machine."""
        return self._runtime.cost_curve

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError if it has none."""
        if self.model.tokenizer is None:
            raise ConfigError(f"model {self.model.name!r} has no tokenizer; give token ids instead of text")
        return self.model.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget the cached beginnings of prompts, for every tenant; what comes next is read as for the first time."""
        self._runtime.prefix_cache.clear()

    # -- whole answers -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tenant: str = DEFAULT_TENANT,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, as one batch; answers come in the order of the prompts.

        prompts: text, or token ids; one or a list. params: for all of them, or one each.
        tenant: drafters and prefix cache remember what a tenant's requests said, for that tenant alone. What they can
        keep is shared out among owners: what stands before the first "/" of a tenant's name.
        Ctrl-C ends every request with what it has committed, finish reason "aborted". A request for which the model
        gives no usable logits ends with the finish reason "error"; the others go on. If the executor fails, the
        requests that were running end so.
        """
        batch: Sequence[Prompt] = [prompts] if _is_one(prompts) else prompts  # type: ignore[list-item, assignment]
        return self._run([self._encode(prompt) for prompt in batch], params, use_tqdm=use_tqdm, tenant=tenant)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tenant: str = DEFAULT_TENANT,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, each a list of ``{"role": …, "content": …}``, through the chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [self.tokenizer.encode_chat(conversation) for conversation in conversations]
        return self._run(prompts, params, use_tqdm=use_tqdm, tenant=tenant)

    # -- pieces as they come -------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Generator[Delta]:
        """Answer one prompt piece by piece, a piece a round; the last one carries the whole answer.

        Closing the generator aborts the request. Ctrl-C yields a last piece, finish reason "aborted".
        """
        return self._pieces(self._engine.new_request(self._encode(prompt), params or SamplingParams(), tenant))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Generator[Delta]:
        """`stream` for a conversation."""
        prompt = self.tokenizer.encode_chat(messages)
        return self._pieces(self._engine.new_request(prompt, params or SamplingParams(), tenant))

    # -- running -------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise UsageError("a prompt must be text or a sequence of whole numbers (token ids)") from None

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        tenant: str,
    ) -> list[RequestOutput]:
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one, or one each")
        requests = [self._engine.new_request(p, own, tenant) for p, own in zip(prompts, each, strict=True)]
        try:
            for request in requests:
                self._engine.submit(request)
            with suppress(KeyboardInterrupt):
                self._drive(requests, use_tqdm=use_tqdm and len(requests) > 1)
        finally:
            for request in requests:
                self._engine.abort(request)
        return [request.result() for request in requests]

    def _drive(self, requests: Sequence[Request], *, use_tqdm: bool) -> None:
        from tqdm import tqdm

        tokens = 0
        with tqdm(total=len(requests), desc="requests", unit="req", disable=not use_tqdm) as bar:
            while not all(request.finished for request in requests):
                with deferred_interrupt():
                    stepped = self._engine.step()
                for request in stepped:
                    tokens += len(request.take_delta().token_ids)
                    bar.update(int(request.finished))
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)

    def _pieces(self, request: Request) -> Generator[Delta]:
        # Queued here and not before: a stream that nobody reads never starts, and must not be run by its neighbours.
        self._engine.submit(request)
        try:
            ended = False
            while not ended:
                try:
                    stepped: list[Request] = []
                    # What else runs on this engine may have taken the request to its end already.
                    if not request.finished:
                        with deferred_interrupt():
                            stepped = self._engine.step()
                    ended = request.finished
                    if ended or request in stepped:
                        yield request.take_delta()
                except KeyboardInterrupt:
                    # Also one that the reader throws in: the last piece, with what was committed, comes all the same.
                    self._engine.abort(request)
                    ended = False
        finally:
            self._engine.abort(request)


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], (str, Sequence)))
