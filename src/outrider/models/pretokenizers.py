"""How text is cut before byte-pair merging, by the name that GGUF files give (``tokenizer.ggml.pre``).

The patterns are those of the tokenizers that the names come from (the files named tokenizer.json of SmolLM2, Qwen2,
Llama 3 and Mistral Nemo); llama.cpp's ``src/llama-vocab.cpp`` maps further names to the same patterns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """The pattern that GPT-4 brought, with its own rule for runs of digits."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """pattern: what to cut out, None for GPT-2's own; digits: first cut every digit off; nfc: normalise to NFC;
    whole_words: a piece that is a token is taken as it is, without merging; add_bos: unless the file says otherwise.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(digits=True)
_QWEN2 = PreTokenizer(_words(r"\p{N}"), nfc=True)
_LLAMA3 = PreTokenizer(_words(r"\p{N}{1,3}"), whole_words=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": PreTokenizer(_LLAMA3.pattern),
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, add_bos=True),
}
