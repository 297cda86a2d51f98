"""Small tokenizers, trained here and written into GGUF files as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from outrider.models.gguf import GGUFFile
from outrider.models.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.support.models import random_model, write_gguf

TEXT = (
    "The quick brown fox jumps over the lazy dog. Der Fuchs, der über den Hund springt: 3.14159 and 2,718!\n"
    "def f(x):\n    return x ** 2  # naïve café 日本語 日本 🎉🎉 👩‍👩‍👧\n\n\tI'll, I'LL, we've don't CAN'T\r\n"
    "1234567890 0x1F  two  spaces   three — “quoted” text… Ελληνικά русский عربى\n"
) * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = ["<tool>", "   "]


def cutting(pre: str) -> pre_tokenizers.PreTokenizer:
    """What the tokenizer.json of the models behind each name does, spelled out."""
    digits = r"\p{N}{1,3}" if "llama" in pre else r"\p{N}"
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])


@cache
def trained(pre: str) -> Backend:
    """A byte-level BPE tokenizer as its makers would ship it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = cutting(pre)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in USER])
    return backend


def gguf_metadata(backend: Backend, pre: str, padding: int = 0) -> dict[str, Any]:
    """The tokenizer fields that llama.cpp's converter would write for ``backend``."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    kinds = [3 if token in SPECIAL else 4 if token in USER else 1 for token in tokens]
    model = json.loads(backend.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in range(padding))],
        "tokenizer.ggml.token_type": [*kinds, *[5] * padding],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": vocabulary["<|im_end|>"],
        "tokenizer.ggml.bos_token_id": vocabulary["<|im_start|>"],
    }


def gguf_tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    model = random_model("llama", bos_token_id=None, eos_token_ids=())
    tokenizer = tokenizer_from_gguf(GGUFFile(write_gguf(model, path, metadata=metadata)))
    assert tokenizer is not None
    return tokenizer
