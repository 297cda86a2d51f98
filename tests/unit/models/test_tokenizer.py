"""Byte-level tokenizers built from GGUF files, on small vocabularies trained here; streaming them back to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import ModelFileError, UnsupportedModelError, UsageError
from outrider.models.pretokenizers import PRE_TOKENIZERS
from outrider.models.tokenizer import Tokenizer, tokenizer_from_folder
from tests.support.tokenizers import SPECIAL, TEXT, gguf_metadata, gguf_tokenizer, trained

SAMPLES = [
    "",
    " ",
    TEXT,
    "hello there, fox 42 times 1234",
    "\n\n  \t x",
    "e\u0301 and \u00e9",
    "<|im_start|>user\nhi<|im_end|>",
    "a<tool>b   c",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🏳️‍🌈 \u00a0\u2003",
    "I'Ll we'D isn't O'Neil",
    "AbcDEFghi HTTPServer",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return gguf_tokenizer(tmp_path_factory.mktemp("byte") / "m.gguf", gguf_metadata(trained("gpt-2"), "gpt-2"))


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "qwen2", "llama-bpe"])
def test_gguf_encodes_and_decodes_as_its_makers_do(tmp_path: Path, pre: str) -> None:
    theirs = trained(pre)
    if pre == "llama-bpe":
        theirs.model.ignore_merges = True
    metadata = gguf_metadata(theirs, pre, padding=7) | {"tokenizer.ggml.add_bos_token": False}
    ours = gguf_tokenizer(tmp_path / "m.gguf", metadata)
    for text in SAMPLES:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == theirs.get_vocab_size(with_added_tokens=True)


def test_pre_tokenizers_differ_where_they_should(tmp_path: Path) -> None:
    """The twin of the test above: with another name's rules the same samples come out differently."""
    theirs = trained("smollm")
    ours = gguf_tokenizer(tmp_path / "m.gguf", gguf_metadata(theirs, "gpt-2"))
    assert any(ours.encode(text) != theirs.encode(text).ids for text in SAMPLES)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loses_nothing(tmp_path: Path, pre: str) -> None:
    metadata = gguf_metadata(trained("gpt-2"), pre) | {"tokenizer.ggml.add_bos_token": False}
    ours = gguf_tokenizer(tmp_path / "m.gguf", metadata)
    for text in SAMPLES:
        if not PRE_TOKENIZERS[pre].nfc:
            assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I've 1234 cats", ["I", "'ve", " 1234", " cats"]),
        ("smollm", "x 12 3", ["x", " ", "1", "2", " ", "3"]),
        ("qwen2", "ab 1234!\n\n c", ["ab", " ", "1", "2", "3", "4", "!\n\n", " c"]),
        ("llama-bpe", "ab 1234!\n\n c", ["ab", " ", "123", "4", "!\n\n", " c"]),
        ("tekken", "fooBar isn't 12", ["foo", "Bar", " isn", "'t", " ", "1", "2"]),
    ],
)
def test_where_text_is_cut(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    ours = gguf_tokenizer(tmp_path / "m.gguf", gguf_metadata(trained("gpt-2"), pre))
    assert ours._backend.pre_tokenizer is not None
    assert [text[a:b] for _, (a, b) in ours._backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_ids_of_specials_and_ends(tokenizer: Tokenizer) -> None:
    names = [tokenizer.token_id(text) for text in SPECIAL]
    assert tokenizer.special_ids == set(names)
    assert tokenizer.bos_id == names[1]
    assert tokenizer.end_ids == (names[2], names[0])  # the file's own first, then what else ends a text
    assert tokenizer.token_id("no such token") is None


def test_bos_is_added_when_the_file_says_so(tmp_path: Path) -> None:
    metadata = gguf_metadata(trained("gpt-2"), "gpt-2")
    plain = gguf_tokenizer(tmp_path / "a.gguf", metadata)
    adding = gguf_tokenizer(tmp_path / "b.gguf", metadata | {"tokenizer.ggml.add_bos_token": True})
    ids = plain.encode("hello")
    assert adding.encode("hello") == [adding.bos_id, *ids]
    assert adding.encode("hello", add_special_tokens=False) == ids
    assert adding.encode("<|im_start|>hello") == [adding.bos_id, *ids]
    assert adding.encode("") == [adding.bos_id]


def test_llama_3_adds_bos_by_default(tmp_path: Path) -> None:
    ours = gguf_tokenizer(tmp_path / "m.gguf", gguf_metadata(trained("llama-bpe"), "llama-bpe"))
    assert ours.encode("fox")[0] == ours.bos_id


def test_padding_tokens_have_no_text(tmp_path: Path) -> None:
    theirs = trained("gpt-2")
    ours = gguf_tokenizer(tmp_path / "m.gguf", gguf_metadata(theirs, "gpt-2", padding=3))
    used = theirs.get_vocab_size(with_added_tokens=True)
    for unused in (used, used + 2, used + 1000, -1):
        assert ours.token_bytes(unused) == b""
        assert ours.decode([unused]) == ""
    plain = gguf_tokenizer(tmp_path / "n.gguf", gguf_metadata(theirs, "gpt-2"))
    assert ours.fingerprint == plain.fingerprint


def test_fingerprints_tell_vocabularies_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    metadata = gguf_metadata(trained("gpt-2"), "gpt-2")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[-1], tokens[-2] = tokens[-2], tokens[-1]
    other = gguf_tokenizer(tmp_path / "m.gguf", metadata | {"tokenizer.ggml.tokens": tokens})
    assert other.fingerprint != tokenizer.fingerprint
    trained("gpt-2").save(str(tmp_path / "tokenizer.json"))
    folder = tokenizer_from_folder(tmp_path)
    assert folder is not None
    assert folder.fingerprint == tokenizer.fingerprint


ids_of_any_kind = st.lists(st.integers(-1, 620), max_size=40)


@settings(max_examples=300, derandomize=True)
@given(ids=ids_of_any_kind, skip=st.booleans())
def test_streamed_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    stream = tokenizer.stream(skip)
    pieces = [stream.push(token) for token in ids]
    whole = "".join([*pieces, stream.flush()])
    assert whole == tokenizer.decode(ids, skip)
    known = [token for token in ids if token >= 0]
    assert whole == tokenizer._backend.decode(known, skip_special_tokens=skip)
    again = "".join([*map(stream.push, ids), stream.flush()])
    assert again == whole


@settings(max_examples=200, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives_the_round_trip_token_by_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    stream = tokenizer.stream(skip_special_tokens=False)
    shown = ""
    for token in ids:
        shown += stream.push(token)
        assert text.startswith(shown)
    assert shown + stream.flush() == text


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("𝔘", add_special_tokens=False)
    assert len(ids) == 4
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["", "", "", "𝔘"]
    assert stream.flush() == ""
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"


def test_lone_surrogates_are_the_callers_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModelError, "tokenizer 't5' is not supported"),
        ({"tokenizer.ggml.pre": "viking"}, UnsupportedModelError, "pre-tokenizer 'viking' is not supported.*qwen2"),
        ({"tokenizer.ggml.merges": ["ab"]}, ModelFileError, "'ab' is not a merge"),
        ({"tokenizer.ggml.merges": ["q\u0100 zz"]}, ModelFileError, "vocabulary cannot be used"),
        ({"tokenizer.ggml.token_type": [1, 1]}, ModelFileError, "2 token types"),
    ],
)
def test_broken_vocabularies(tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        gguf_tokenizer(tmp_path / "m.gguf", gguf_metadata(trained("gpt-2"), "gpt-2") | changes)
    assert "\n" not in str(caught.value)
