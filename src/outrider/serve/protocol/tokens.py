"""The bodies of ``POST /tokenize`` and ``POST /detokenize``, in the form that vLLM's server gave them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from outrider.serve.protocol.base import Body, refuse
from outrider.serve.protocol.chat import ChatMessage
from outrider.serve.protocol.sampling import Token


class TokenizeRequest(Body):
    """A text, or a conversation, to be turned into tokens."""

    model: str | None = Field(None, description="may be left out")
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="begin a text with the model's BOS token; default true")
    add_generation_prompt: bool | None = Field(None, description="end a conversation where the answer begins")
    return_token_strs: bool | None = Field(None, description="also return each token's text")

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("give either prompt or messages", "prompt")
        if self.messages is not None and self.add_special_tokens is not None:
            raise refuse("add_special_tokens is for prompt; a chat template brings its own", "add_special_tokens")
        if self.prompt is not None and self.add_generation_prompt is not None:
            raise refuse("add_generation_prompt is for messages", "add_generation_prompt")
        return self


class DetokenizeRequest(Body):
    """Tokens to be turned into text; special tokens are written out."""

    model: str | None = Field(None, description="may be left out")
    tokens: list[Token]
