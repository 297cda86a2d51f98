"""SentencePiece vocabularies in GGUF files: joined by score, with bytes for letters that have no piece."""

from __future__ import annotations

import heapq
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import ModelFileError
from outrider.models.tokenizer import Tokenizer
from tests.support.tokenizers import gguf_tokenizer

PIECES = ["\u2581", "t", "h", "e", "a", "n", "d", "o", "g", "s", "\u2581t", "he", "\u2581the", "an", "nd", "and"]
PIECES += ["\u2581and", "do", "og", "dog", "\u2581d", "\u2581dog", "gs", "dogs", "\u2581a", "th", "the", "\u2581\u2581"]
MARKS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_metadata() -> dict[str, Any]:
    tokens = [*MARKS, *BYTES, *PIECES]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * (3 + 256) + [-float((7 * i) % len(PIECES)) for i in range(len(PIECES))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def join_best_pairs(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's own procedure: join the neighbours whose joined piece scores highest, leftmost first."""
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    number = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in PIECES]
        if not pairs:
            break
        _, at = heapq.nsmallest(1, pairs)[0]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [number[symbol]] if symbol in number else [3 + byte for byte in symbol.encode()]
    return ids


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return gguf_tokenizer(tmp_path_factory.mktemp("spm") / "m.gguf", sentencepiece_metadata())


@settings(max_examples=300, derandomize=True)
@given(text=st.text(st.sampled_from([*"theandogs  ", "ü", "🎉"]), min_size=1, max_size=24))
def test_sentencepiece_joins_by_score(spm: Tokenizer, text: str) -> None:
    assert spm.encode(text) == [1, *join_best_pairs(text, sentencepiece_metadata())]


@settings(max_examples=200, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_sentencepiece_round_trip(spm: Tokenizer, text: str) -> None:
    if "\u2581" not in text:  # the letter that stands for a space
        assert spm.decode(spm.encode(text)) == text


@settings(max_examples=300, derandomize=True)
@given(ids=st.lists(st.integers(0, 3 + 256 + len(PIECES)), max_size=30), skip=st.booleans())
def test_sentencepiece_streams_what_it_decodes(spm: Tokenizer, ids: list[int], skip: bool) -> None:
    stream = spm.stream(skip)
    whole = "".join([*map(stream.push, ids), stream.flush()])
    assert whole == spm.decode(ids, skip)
    if (
        "\ufffd" not in whole
    ):  # on bytes that are no UTF-8 the library gives one U+FFFD a byte, we one a broken character
        assert whole == spm._backend.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_leading_space(spm: Tokenizer) -> None:
    dog = spm.token_id("\u2581dog")
    assert dog is not None
    assert spm.token_bytes(dog) == b" dog"
    stream = spm.stream()
    assert [stream.push(1), stream.push(dog), stream.push(dog)] == ["", "dog", " dog"]


def test_scores_of_another_length(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="but 1 scores"):
        gguf_tokenizer(tmp_path / "m.gguf", sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0]})
