"""Answers in the form of each endpoint: whole, or in the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.serve.protocol.answers import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    FinishReason,
    Message,
    ToolCallAnswer,
)
from outrider.serve.texts import TextOffsets, chat_logprobs, completion_logprobs
from outrider.serve.usage import usage

if TYPE_CHECKING:
    from outrider.engine.outputs import RequestOutput
    from outrider.models.tokenizer import Tokenizer
    from outrider.serve.engine_adapter import ToolCallPiece, ToolReader
    from outrider.serve.generation import Piece
    from outrider.serve.protocol.chat import ChatRequest
    from outrider.serve.protocol.completions import CompletionRequest

Chunk = dict[str, Any]

FINGERPRINT = f"outrider-{__version__}"


class Writer(ABC):
    """Writes the answers of one HTTP request.

    choices: answers to each prompt. usage_in_stream: whether a stream ends with the usage.
    """

    kind: str
    prefix: str

    def __init__(self, body: CompletionRequest | ChatRequest, tokenizer: Tokenizer) -> None:
        self.choices = body.choices
        self.usage_in_stream = body.usage_in_stream
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": FINGERPRINT,
        }

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> Mapping[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def begin(self, answers: int) -> list[Chunk]:
        """Chunks that a stream of so many answers begins with."""

    @abstractmethod
    def chunks(self, piece: Piece) -> list[Chunk]:
        """Chunks of a stream for one piece; none while nothing can be shown yet."""

    def usage_chunk(self, outputs: Sequence[RequestOutput]) -> Chunk:
        """The last chunk of a stream that was asked for usage."""
        return {**self._head, "object": self.kind, "choices": [], "usage": usage(outputs, self.choices)}

    def _chunk(self, choice: Chunk) -> Chunk:
        chunk = {**self._head, "object": self.kind, "choices": [choice]}
        return {**chunk, "usage": None} if self.usage_in_stream else chunk


class CompletionWriter(Writer):
    """The form of /v1/completions. prompts: texts to begin the answers with, one a prompt, if they are to be echoed."""

    kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer, prompts: Sequence[str] | None) -> None:
        super().__init__(body, tokenizer)
        self._prompts = prompts
        self._with_logprobs = body.logprobs is not None
        self._skip_special = body.skip_special_tokens is not False
        self._offsets: dict[int, TextOffsets] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices: list[CompletionChoice] = []
        for index, output in enumerate(outputs):
            logprobs = None
            if output.logprobs is not None:
                logprobs = completion_logprobs(self._tokenizer, output.logprobs, self._offsets_of(index))
            choices.append(
                {
                    "index": index,
                    "text": self._echo(index) + output.text,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason(output),
                    "stop_reason": output.stop_reason,
                    "seed": output.seed,
                }
            )
        return {
            **self._head,  # type: ignore[typeddict-item]
            "object": "text_completion",
            "choices": choices,
            "usage": usage(outputs, self.choices),
        }

    def begin(self, answers: int) -> list[Chunk]:
        if self._prompts is None:
            return []
        return [self._chunk(_text_choice(index, self._echo(index), None)) for index in range(answers)]

    def chunks(self, piece: Piece) -> list[Chunk]:
        if not piece.text and not piece.logprobs and piece.output is None:
            return []
        logprobs = None
        if self._with_logprobs:
            logprobs = completion_logprobs(self._tokenizer, piece.logprobs, self._offsets_of(piece.index))
        choice = _text_choice(piece.index, piece.text, logprobs)
        if piece.output is not None:
            choice |= {
                "finish_reason": finish_reason(piece.output),
                "stop_reason": piece.output.stop_reason,
                "seed": piece.output.seed,
            }
        return [self._chunk(choice)]

    def _echo(self, index: int) -> str:
        return self._prompts[index // self.choices] if self._prompts is not None else ""

    def _offsets_of(self, index: int) -> TextOffsets:
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(self._tokenizer, skip_special_tokens=self._skip_special)
        return self._offsets[index]


def _text_choice(index: int, text: str, logprobs: Mapping[str, Any] | None) -> Chunk:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}


class ChatWriter(Writer):
    """The form of /v1/chat/completions. tools: what reads the calls in each answer, if there may be any."""

    kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, tools: Sequence[ToolReader] | None) -> None:
        super().__init__(body, tokenizer)
        self._tools = tools
        self._with_logprobs = bool(body.logprobs)

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        choices: list[ChatChoice] = []
        for index, output in enumerate(outputs):
            message, called = self._message(index, output)
            logprobs = None if output.logprobs is None else chat_logprobs(self._tokenizer, output.logprobs)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": finish_reason(output, called=called),
                    "stop_reason": output.stop_reason,
                    "seed": output.seed,
                }
            )
        return {
            **self._head,  # type: ignore[typeddict-item]
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(outputs, self.choices),
        }

    def _message(self, index: int, output: RequestOutput) -> tuple[Message, bool]:
        """The answer as a message, and whether it calls a tool."""
        content, calls = (output.text, []) if self._tools is None else self._tools[index].whole(output.text)
        message: Message = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in calls]
        return message, bool(calls)

    def begin(self, answers: int) -> list[Chunk]:
        opening = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(_delta_choice(index, dict(opening))) for index in range(answers)]

    def chunks(self, piece: Piece) -> list[Chunk]:
        text, called = piece.text, False
        calls: list[ToolCallPiece] = []
        if self._tools is not None:
            stream = self._tools[piece.index]
            text, calls = stream.feed(piece.text, last=piece.output is not None)
            called = stream.calls > 0
        found: list[Chunk] = []
        if text or piece.logprobs:
            choice = _delta_choice(piece.index, {"content": text})
            if self._with_logprobs:
                choice["logprobs"] = chat_logprobs(self._tokenizer, piece.logprobs)
            found.append(choice)
        if calls:
            found.append(_delta_choice(piece.index, {"tool_calls": [_call_delta(call) for call in calls]}))
        if piece.output is not None:
            end = _delta_choice(piece.index, {})
            end["finish_reason"] = finish_reason(piece.output, called=called)
            end["stop_reason"] = piece.output.stop_reason
            end["seed"] = piece.output.seed
            found.append(end)
        return [self._chunk(choice) for choice in found]


def _delta_choice(index: int, delta: Chunk) -> Chunk:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(call: ToolCallPiece) -> ToolCallAnswer:
    return {
        "id": call.id or "",
        "type": "function",
        "function": {"name": call.name or "", "arguments": call.arguments},
    }


def _call_delta(call: ToolCallPiece) -> Chunk:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}


def finish_reason(output: RequestOutput, *, called: bool = False) -> FinishReason:
    """The reason in OpenAI's words. Answers that were aborted, or failed, never come this far."""
    if called and output.finish_reason == "stop":
        return "tool_calls"
    return "length" if output.finish_reason == "length" else "stop"
