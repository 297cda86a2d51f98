"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from outrider.serve.protocol.base import refuse
from outrider.serve.protocol.sampling import SamplingFields, Token

DEFAULT_MAX_TOKENS = 16

Ids = Annotated[list[Token], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """A text, or several, to be continued."""

    refused: ClassVar = {"suffix": "the text is continued at its end only"}

    prompt: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)] = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists"
    )
    echo: bool | None = Field(None, description="begin the answer with the prompt")
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = Field(None, description="must equal n")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="log-probabilities of the answer's tokens, and of this many most likely ones"
    )

    @model_validator(mode="after")
    def _combinations(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.choices:
            raise refuse("best_of is not supported: ask for n answers and choose among them", "best_of")
        if self.echo and self.logprobs is not None:
            raise refuse("echo with logprobs is not supported: prompts get no log-probabilities", "echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def sampling_values(self) -> dict[str, Any]:
        return {"max_tokens": DEFAULT_MAX_TOKENS, **super().sampling_values(), "logprobs": self.logprobs}
