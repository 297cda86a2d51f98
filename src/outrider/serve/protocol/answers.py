"""What the server answers, as typed dictionaries: checked by mypy, described in the OpenAPI, and free to build."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic reads the standard one from Python 3.12 on

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorObject(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """What every status of 400 and more comes with."""

    error: ErrorObject


class SpeculativeUsage(TypedDict):
    """What speculation did for this request; the words are those of docs/speculation.md."""

    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float
    mean_acceptance_length: float
    accepted_by_position: list[int]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    failures: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    lossy: bool


class PromptTokensDetails(TypedDict):
    """cached_tokens: tokens of the prompts that were found in the prefix cache, over all answers."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens, over all answers of the request; a prompt counts once."""

    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    total_tokens: int
    speculative: SpeculativeUsage


class TopLogprob(TypedDict):
    """A token that could have been, with its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token that was."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities in the form of chat completions."""

    content: list[ChatLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log-probabilities in the form of completions; text_offset: where a token starts in the text, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionCall(TypedDict):
    """arguments: a JSON object in a string."""

    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """The answer as a turn of the conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallAnswer]]


class ChatChoice(TypedDict):
    """One answer. seed: with it the same text comes again."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int


class ChatCompletion(TypedDict):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(TypedDict):
    """One continuation. seed: with it the same text comes again."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int


class Completion(TypedDict):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(TypedDict):
    """A name by which requests may call the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    """Answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    """Answer of /detokenize."""

    prompt: str


class State(TypedDict):
    """Answer of /health and /ready."""

    status: str
