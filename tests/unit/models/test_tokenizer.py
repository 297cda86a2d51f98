"""Tokenizers built from GGUF files and from tokenizer.json, on small vocabularies trained here."""

from __future__ import annotations

import heapq
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from outrider.core.errors import ModelFileError, UnsupportedModelError, UsageError
from outrider.models.gguf import GGUFFile
from outrider.models.loader import load_model
from outrider.models.pretokenizers import PRE_TOKENIZERS
from outrider.models.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from tests.support.models import random_model, write_gguf, write_hf_folder

TEXT = (
    "The quick brown fox jumps over the lazy dog. Der Fuchs, der über den Hund springt: 3.14159 and 2,718!\n"
    "def f(x):\n    return x ** 2  # naïve café 日本語 日本 🎉🎉 👩‍👩‍👧\n\n\tI'll, I'LL, we've don't CAN'T\r\n"
    "1234567890 0x1F  two  spaces   three — “quoted” text… Ελληνικά русский عربى\n"
) * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = ["<tool>", "   "]
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


@cache
def byte_level(folder: Path) -> Tokenizer:
    return gguf_tokenizer(folder / "shared.gguf", gguf_metadata(trained("gpt-2"), "gpt-2"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("byte"))


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


# SentencePiece


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


# folders


def write_tokenizer(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    trained("gpt-2").save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_folder_with_its_settings(tmp_path: Path) -> None:
    settings_ = {
        "bos_token": {"content": "<|im_start|>", "lstrip": False},
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    }
    ours = tokenizer_from_folder(write_tokenizer(tmp_path, settings_))
    assert ours is not None
    assert ours.bos_id == ours.token_id("<|im_start|>")
    assert ours.end_ids == (ours.token_id("<|im_end|>"),)
    assert ours.encode("hi")[0] == ours.bos_id
    assert ours.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"
    assert ours.encode_chat([{"role": "user", "content": "hi"}]) == ours.encode("hi")


def test_folder_post_processor_adds_bos_once(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_str(trained("gpt-2").to_str())
    bos = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    ours = tokenizer_from_folder(tmp_path)
    assert ours is not None
    plain = ours.encode("hi", add_special_tokens=False)
    assert ours.encode("hi") == [bos, *plain]
    assert ours.encode("<|im_start|>hi") == [bos, *plain]


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = write_tokenizer(tmp_path, {"chat_template": named})
    message = [{"role": "user", "content": "hi"}]
    ours = tokenizer_from_folder(folder)
    assert ours is not None
    assert ours.render_chat(message) == "plain"
    (folder / "chat_template.jinja").write_text("from the file")
    ours = tokenizer_from_folder(folder)
    assert ours is not None
    assert ours.render_chat(message) == "from the file"


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None
    (tmp_path / "tokenizer.model").write_text("")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model but no tokenizer\.json; make one"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: not a valid tokenizer"):
        tokenizer_from_folder(tmp_path)


def test_word_pieces_are_refused(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="decode by WordPiece"):
        tokenizer_from_folder(tmp_path)


def test_loader_joins_what_ends_a_text(tmp_path: Path) -> None:
    folder = write_hf_folder(random_model("llama", eos_token_ids=(5,)), tmp_path)
    write_tokenizer(folder, {"eos_token": "<|im_end|>"})
    model = load_model(str(folder))
    assert model.tokenizer is not None
    assert model.config.eos_token_ids == (5, model.tokenizer.token_id("<|im_end|>"))


# broken vocabularies


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


def test_scores_of_another_length(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="but 1 scores"):
        gguf_tokenizer(tmp_path / "m.gguf", sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0]})
