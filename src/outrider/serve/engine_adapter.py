"""All that the server knows of the engine, of structured output and of tool calls is in this module.

Where the engine lacks something, a request for it is refused by name; nothing is ever ignored.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from outrider.chat.tools import CallStart, ContentPiece, ToolCallParser, constraint
from outrider.core import config
from outrider.core.errors import UsageError
from outrider.core.sampling import SamplingParams
from outrider.core.structured import StructuredOutputs
from outrider.engine.outputs import SpeculationStats
from outrider.grammar import prepare
from outrider.serve.errors import APIError, not_available

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import RequestOutput
    from outrider.engine.request import Request
    from outrider.models.tokenizer import Tokenizer


@dataclass
class EngineStats:
    """Counters of the engine since it started; see `Metrics` for what each means."""

    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    by_drafter: dict[str, dict[str, int]] = field(default_factory=dict)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    engine_seconds: float = 0.0
    planner_budget: int = 0
    drafter_failures: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class ToolCallPiece:
    """A piece of a call: id and name come with its first piece, arguments in any."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class EngineAdapter:
    """An `LLM` as the server uses it. `step`, `submit`, `abort` and `stats` belong to the engine's thread alone;
    the rest may be called from any.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine: Any = llm._engine
        self._new_request_options = set(inspect.signature(self._engine.new_request).parameters)
        self._lock = threading.Lock()
        self._ended = SpeculationStats()
        self.step = self._engine.step
        self.submit = self._engine.submit

    # -- the model -----------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self._llm.model.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def vocab_size(self) -> int:
        return self._llm.model.config.vocab_size

    @property
    def max_context(self) -> int:
        return self._llm.executor.max_context

    def describe(self) -> dict[str, str]:
        """What runs here, for logs and metrics."""
        own = self._llm.speculative_config
        return {"executor": self._llm.executor_name, "method": own.method, "acceptance": own.acceptance}

    # -- requests ------------------------------------------------------------------------------------------------------

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, generate: bool = True
    ) -> list[int]:
        """A conversation as token ids. Raises a UsageError if the template rejects it, or has no place for tools."""
        return self.tokenizer.encode_chat(messages, add_generation_prompt=generate, tools=tools or None)

    def sampling_params(
        self, values: Mapping[str, Any], structure: StructuredOutputs | Mapping[str, Any] | None, param: str
    ) -> SamplingParams:
        """`SamplingParams`, bound to ``structure`` if there is one, which is compiled here.

        structure: what `forced_call` gave, or the fields of a `StructuredOutputs`. param: the field of the request that
        asks for it. Raises SamplingParamsError, or APIError that names the field if the structure cannot be used.
        """
        if structure is None:
            return SamplingParams(**values)
        try:
            if isinstance(structure, Mapping):
                structure = StructuredOutputs(**structure)
            # Not under the lock that all new requests go through: a large schema takes its time.
            prepare(self._llm.model, SamplingParams(structured_outputs=structure))
        except UsageError as error:
            raise APIError(400, str(error), param=param, code="invalid_value") from None
        return SamplingParams(**{**values, "structured_outputs": structure})

    def new_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str,
        priority: int | None,
        speculative: Mapping[str, Any] | None,
    ) -> Request:
        """A request, not queued yet. Raises a UsageError, or APIError for what this build cannot do."""
        options: dict[str, Any] = {}
        if priority is not None:
            options["priority"] = priority
        if speculative is not None:
            override = getattr(config, "SpeculativeOverride", None)
            options["speculation"] = override(**speculative) if override else None
        for option, param in (("priority", "priority"), ("speculation", "speculative")):
            if option in options and option not in self._new_request_options:
                raise not_available(param, param)
        with self._lock:  # the engine hands out ids without one
            request: Request = self._engine.new_request(prompt, params, tenant=tenant, **options)
        return request

    def abort(self, request: Request) -> None:
        """End a request with what it has committed."""
        self._engine.abort(request)

    def has_started(self, request: Request) -> bool:
        """Whether the request holds a place in the batch."""
        return request.seq is not None

    def broke_down(self, request: Request) -> bool:
        """Whether the request ended because the engine failed, and not because of what it asked for."""
        return request.finished and is_internal(request.error)

    # -- figures -------------------------------------------------------------------------------------------------------

    def ended(self, request: Request) -> None:
        """A request has left the engine."""
        self._ended = SpeculationStats.total([self._ended, request.statistics])

    def stats(self, live: Collection[Request]) -> EngineStats:
        """The engine's counters now; ``live``: the requests that wait or run."""
        own = getattr(self._engine, "stats", None)
        if own is not None:
            return EngineStats(**{item.name: getattr(own, item.name) for item in fields(EngineStats)})
        executor = self._llm.executor
        total = SpeculationStats.total([self._ended, *(request.statistics for request in live)])
        running = sum(map(self.has_started, live))
        names = sorted({*total.drafted_by_source, *total.accepted_by_source})
        return EngineStats(
            running=running,
            waiting=len(live) - running,
            kv_tokens_used=executor.total_tokens - executor.free_tokens,
            kv_tokens_total=executor.total_tokens,
            num_drafts=total.drafted_rounds,
            num_draft_tokens=total.drafted,
            num_accepted_tokens=total.accepted,
            accepted_per_pos=total.accepted_by_position,
            by_drafter={
                name: {
                    "draft_tokens": total.drafted_by_source.get(name, 0),
                    "accepted_tokens": total.accepted_by_source.get(name, 0),
                }
                for name in names
            },
            draft_seconds=total.draft_seconds,
            verify_seconds=total.verify_seconds,
            accept_seconds=total.accept_seconds,
            engine_seconds=total.engine_seconds,
            drafter_failures=total.failures,
            rounds=total.rounds,
        )

    # -- tool calls ----------------------------------------------------------------------------------------------------

    def tool_reader(self, tools: Sequence[Mapping[str, Any]]) -> ToolReader:
        """Reads the calls in one answer. Raises a UsageError for tools that are none, or a model that knows none."""
        return ToolReader(ToolCallParser.for_model(self._llm.model, tools))

    def forced_call(
        self, tools: Sequence[Mapping[str, Any]], choice: Any, *, parallel: bool
    ) -> StructuredOutputs | None:
        """What holds an answer to a call, "required" or of a named tool; None where the model is free.

        parallel: whether there may be several. Raises a UsageError, as `tool_reader` does.
        """
        return constraint(self._llm.model, tools, choice, parallel=parallel)


class ToolReader:
    """Splits one answer into content and calls: at once, or as it comes. calls: how many there have been so far."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self.calls = 0

    def whole(self, text: str) -> tuple[str, list[ToolCallPiece]]:
        """Content and calls of a finished answer."""
        content, calls = self._parser.parse(text)
        self.calls = len(calls)
        return content, [ToolCallPiece(i, call.id, call.name, call.arguments) for i, call in enumerate(calls)]

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCallPiece]]:
        """New content and new pieces of calls; ``last``: the answer ends with this text."""
        content, pieces = "", []
        for event in [*self._parser.feed(text), *(self._parser.finish() if last else ())]:
            if isinstance(event, ContentPiece):
                content += event.text
            elif isinstance(event, CallStart):
                self.calls = event.index + 1
                pieces.append(ToolCallPiece(event.index, event.id, event.name))
            else:
                pieces.append(ToolCallPiece(event.index, arguments=event.arguments))
        return content, pieces


def cached_tokens(output: RequestOutput) -> int:
    """Prompt tokens of an answer that were in the prefix cache; 0 where the engine has none."""
    return getattr(output, "cached_tokens", 0)


def is_internal(error: str | None) -> bool:
    """Whether an error of a request is one that nobody foresaw: it then begins with the class of what was raised.

    Its words are for the log. Those of our own errors begin in lower case, and are for the client as well.
    """
    return error is not None and re.match(r"[A-Z]\w*: ", error) is not None
