"""From token ids back to text, one token at a time, without ever showing half a character."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection
from functools import cache
from typing import TYPE_CHECKING, Any

from outrider.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPACE = "\u2581"


@cache
def _bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2's table).

    Printable bytes stand for themselves; the others are numbered, in order, from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    table = _bytes_of_letters()
    try:
        return bytes([table[letter] for letter in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


class TokenBytes:
    """Bytes of each token of a vocabulary, and how they make a text.

    strips_space: the text of a sequence starts without the space that its first token may carry.
    Raises UnsupportedModelError for a tokenizer whose text is not the concatenation of its tokens' bytes.
    """

    def __init__(self, backend: Backend, where: str) -> None:
        self._backend = backend
        state: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
        parts = {part["type"]: part for part in state.get("decoders", [state])}
        self._decode: Callable[[str], bytes]
        if "ByteLevel" in parts:
            self._decode, self.strips_space = _byte_level, False
        elif "ByteFallback" in parts:
            self._decode, self.strips_space = _sentencepiece, parts.get("Strip", {}).get("start", 0) > 0
        else:
            raise UnsupportedModelError(
                f"{where}: tokenizers that decode by {', '.join(parts)} are not supported; "
                "byte-level BPE and SentencePiece with byte fallback are"
            )
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id that the vocabulary does not use."""
        data = self._known.get(token_id)
        if data is None:
            text = self._backend.id_to_token(token_id) if token_id >= 0 else None
            data = self._known[token_id] = b"" if text is None else self._decode(text)
        return data


class TokenStream:
    """Text of a growing sequence. The pieces and `flush` together are exactly what decoding it in one go gives."""

    def __init__(self, token_bytes: TokenBytes, skipped: Collection[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = token_bytes.strips_space

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is final now, without the bytes of an unfinished character."""
        if token_id in self._skipped:
            return ""
        return self._stripped(self._utf8.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        """End the text; an unfinished character becomes U+FFFD. The stream starts afresh."""
        text = self._stripped(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._strip = self._token_bytes.strips_space
        return text

    def _stripped(self, text: str) -> str:
        if not self._strip or not text:
            return text
        self._strip = False
        return text.removeprefix(" ")
