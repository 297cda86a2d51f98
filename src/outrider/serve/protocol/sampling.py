"""The fields that completions and chat completions share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from outrider.serve.protocol.base import Body, refuse

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]


class StreamOptions(Body):
    """What a stream brings besides the text."""

    include_usage: bool | None = Field(None, description="end the stream with a chunk that holds the usage")
    include_obfuscation: bool | None = Field(None, description="without effect: nothing is padded")


class Speculative(Body):
    """How this request is drafted for; the text does not depend on it."""

    method: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="a drafter, or several joined by +; none switches speculation off"
    )
    num_speculative_tokens: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None, description="draft nodes verified per round at most"
    )

    @model_validator(mode="after")
    def _says_something_once(self) -> Speculative:
        if self.method is None and self.num_speculative_tokens is None:
            raise refuse("speculative needs method, num_speculative_tokens or both", "speculative")
        members = (self.method or "").split("+")
        if len(set(members)) < len(members):
            raise refuse(f"speculative.method names a drafter twice: {self.method}", "speculative")
        return self


class SamplingFields(Body):
    """Sampling, limits and what is streamed. null means the default, as in OpenAI's API."""

    model: Annotated[str, Field(min_length=1)] = Field(description="name of the model, as /v1/models lists it")
    stream: bool | None = Field(None, description="answer in pieces, as server-sent events")
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = Field(None, description="answers; the i-th uses seed + i")
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="default 1; 0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1: all tokens")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="token id (as a string) -> number added to its logit"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = Field(
        None, description="negative ones stand for themselves plus 2^64"
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Annotated[str, Field(min_length=1)] | Texts | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = Field(None, description="the answer matches this expression")
    grammar: Annotated[str, Field(min_length=1)] | None = Field(None, description="the answer is of this EBNF grammar")
    cache_salt: str | None = Field(None, description="keeps what this request says apart from requests with another")
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        None, description="lower runs earlier; default 0; the server sets how low it may be"
    )
    speculative: Speculative | None = None
    user: str | None = Field(None, description="without effect")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options needs stream=true", "stream_options")
        return self

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def constrained(self) -> bool:
        """Whether a grammar has to be compiled for the answer."""
        return self.regex is not None or self.grammar is not None

    def sampling_values(self) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`, those that were given, the seed left out."""
        same = (
            *("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
            *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
            "skip_special_tokens",
        )
        given = {name: value for name in same if (value := getattr(self, name)) is not None}
        given["temperature"] = 1.0 if self.temperature is None else self.temperature
        given["top_k"] = max(self.top_k or 0, 0)
        return given
