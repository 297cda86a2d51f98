"""All that the server knows of the engine, of structured output and of tool calls is in this module."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.chat.tools import CallStart, ContentPiece, ToolCallParser, constraint
from outrider.core.config import SpeculativeOverride
from outrider.core.errors import UsageError
from outrider.core.sampling import SamplingParams
from outrider.core.structured import StructuredOutputs
from outrider.grammar import prepare
from outrider.serve.errors import APIError

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.request import Request
    from outrider.engine.stats import EngineStats
    from outrider.models.tokenizer import Tokenizer


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
        self._lock = threading.Lock()
        _ = llm.cost_curve  # measured now, not in the middle of somebody's answer
        self.step = llm.engine.step
        self.submit = llm.engine.submit

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
        self,
        values: Mapping[str, Any],
        structure: StructuredOutputs | Mapping[str, Any] | None,
        param: str,
        tenant: str,
    ) -> SamplingParams:
        """`SamplingParams`, bound to ``structure`` if there is one, which is compiled here for the tenant.

        structure: what `forced_call` gave, or the fields of a `StructuredOutputs`. param: the field of the request that
        asks for it. Raises SamplingParamsError, or APIError that names the field if the structure cannot be used.
        """
        if structure is None:
            return SamplingParams(**values)
        try:
            if isinstance(structure, Mapping):
                structure = StructuredOutputs(**structure)
            # Not under the lock that all new requests go through: a large schema takes its time.
            prepare(self._llm.model, SamplingParams(structured_outputs=structure), tenant)
        except UsageError as error:
            raise APIError(400, str(error), param=param, code="invalid_value") from None
        return SamplingParams(**{**values, "structured_outputs": structure})

    def new_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str,
        client: str,
        priority: int,
        speculative: Mapping[str, Any] | None,
    ) -> Request:
        """A request, not queued yet. See `Engine.new_request`. Raises a UsageError."""
        override = None if speculative is None else SpeculativeOverride(**speculative)
        with self._lock:  # the engine hands out ids without one
            return self._llm.engine.new_request(
                prompt, params, tenant=tenant, client=client, priority=priority, speculation=override
            )

    def abort(self, request: Request) -> None:
        """End a request with what it has committed."""
        self._llm.engine.abort(request)

    def has_started(self, request: Request) -> bool:
        """Whether the request holds a place in the batch."""
        return request.seq is not None

    def broke_down(self, request: Request) -> bool:
        """Whether the request ended because the engine failed, and not because of what it asked for."""
        return request.finished and is_internal(request.error)

    # -- figures -------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A copy of the engine's counters now."""
        return deepcopy(self._llm.engine.stats)

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


def is_internal(error: str | None) -> bool:
    """Whether an error of a request is one that nobody foresaw: it then begins with the class of what was raised.

    Its words are for the log. Those of our own errors begin in lower case, and are for the client as well.
    """
    return error is not None and re.match(r"[A-Z]\w*: ", error) is not None
