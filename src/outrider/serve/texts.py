"""Single tokens as text, and log-probabilities in the two forms that OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from outrider.serve.protocol.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

if TYPE_CHECKING:
    from outrider.engine.outputs import TokenLogprob
    from outrider.models.tokenizer import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def logprob(value: float) -> float:
    """A log-probability that JSON can write."""
    return max(value, _LEAST)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, special tokens included; ``bytes:\\x…`` for a piece of a character, as OpenAI writes it."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The form of chat completions."""

    def one(token: int, value: float) -> TopLogprob:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob(value), "bytes": list(data)}

    content: list[ChatLogprob] = [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(token, value) for token, value in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where each token of one answer starts in its text, in characters, as the tokens come.

    start: characters before the answer. A character's later bytes have the offset that follows it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, start: int = 0) -> None:
        self._stream = tokenizer.stream(skip_special_tokens)
        self._length = start

    def push(self, token: int) -> int:
        """The offset of the next token."""
        at = self._length
        self._length += len(self._stream.push(token))
        return at


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offsets: TextOffsets
) -> CompletionLogprobs:
    """The form of completions. Of two tokens with the same text, the likelier one is listed."""
    tops: list[dict[str, float]] = []
    for entry in entries:
        top: dict[str, float] = {}
        for token, value in entry.top:
            top.setdefault(token_text(tokenizer, token), logprob(value))
        # OpenAI lists the token itself as well, where it is not among the likeliest.
        top.setdefault(token_text(tokenizer, entry.token_id), logprob(entry.logprob))
        tops.append(top)
    return {
        "tokens": [token_text(tokenizer, entry.token_id) for entry in entries],
        "token_logprobs": [logprob(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": [offsets.push(entry.token_id) for entry in entries],
    }
