"""Vocabularies of real kinds: what a tokenizer writes for a text is what a grammar of that text lets through."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.sampling import SamplingParams
from outrider.core.structured import StructuredOutputs
from outrider.grammar import mask_for
from outrider.grammar.matcher import GrammarMask
from outrider.grammar.vocabulary import Vocabulary
from outrider.models.loader import Model
from outrider.models.tokenizer import Tokenizer, tokenizer_from_folder
from tests.support.fakes import fake_model
from tests.support.tokenizers import SPECIAL, gguf_metadata, gguf_tokenizer, trained
from tests.unit.models.test_sentencepiece import sentencepiece_metadata

PADDING = 37
TEXTS = ["{}", " the dog", "the  dogs\n", 'naïve "日本" 🎉', "<tool> in text"]


def model(tokenizer: Tokenizer, end: str) -> Model:
    """A fake model with more logits than its tokenizer has tokens."""
    config = fake_model().config
    ends = (tokenizer.token_id(end),)
    assert ends[0] is not None
    config = replace(config, vocab_size=tokenizer.vocab_size + PADDING, eos_token_ids=ends)  # type: ignore[arg-type]
    return Model("words", config, fake_model().weights, tokenizer)


@pytest.fixture(scope="module", params=["byte-level GGUF", "byte-level folder", "SentencePiece GGUF"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("vocabulary")
    if request.param == "SentencePiece GGUF":
        return model(gguf_tokenizer(folder / "m.gguf", sentencepiece_metadata()), "</s>")
    if request.param == "byte-level GGUF":
        return model(gguf_tokenizer(folder / "m.gguf", gguf_metadata(trained("qwen2"), "qwen2")), "<|im_end|>")
    trained("qwen2").save(str(Path(folder) / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None
    return model(tokenizer, "<|im_end|>")


def own_mask(words: Model, spec: StructuredOutputs) -> GrammarMask:
    mask = mask_for(words, SamplingParams(structured_outputs=spec))
    assert isinstance(mask, GrammarMask)
    return mask


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_passes_its_own_grammar(words: Model, text: str) -> None:
    tokenizer = words.tokenizer
    assert tokenizer is not None
    mask = own_mask(words, StructuredOutputs(choice=[text]))
    ids = tokenizer.encode(text, add_special_tokens=False)
    for token in ids:
        forbidden = mask.forbidden([])
        assert forbidden is not None
        assert len(forbidden) == words.config.vocab_size
        assert not forbidden[token]
        mask.commit(token)
    end = mask.forbidden([])
    assert end is not None
    assert (~end).nonzero()[0].tolist() == list(words.config.eos_token_ids)
    assert tokenizer.decode(ids) == text


def test_only_text_is_let_through(words: Model) -> None:
    """Neither control tokens nor padding, even where the grammar allows any text."""
    mask = own_mask(words, StructuredOutputs(regex="(.|\n)*"))
    vocabulary = Vocabulary(words)
    forbidden = mask.forbidden([])
    assert forbidden is not None
    assert set(range(len(forbidden) - PADDING, len(forbidden))) <= vocabulary.control
    assert not any(forbidden[i] for i in vocabulary.end_ids) or vocabulary.starts_with_space
    assert all(forbidden[i] for i in vocabulary.control - vocabulary.end_ids)
    assert sum(~forbidden) > 0


def test_control_tokens_that_a_text_spells_out_are_written_as_text(words: Model) -> None:
    tokenizer = words.tokenizer
    assert tokenizer is not None
    mask = own_mask(words, StructuredOutputs(json={"const": SPECIAL[1]}))
    text = json.dumps(SPECIAL[1])
    end = text if not tokenizer.token_bytes.strips_space else " " + text
    path: list[int] = []
    written = b""
    while written != end.encode():
        forbidden = mask.forbidden(path)
        assert forbidden is not None
        token = int((~forbidden).nonzero()[0][0])
        assert token not in tokenizer.special_ids
        path.append(token)
        written += tokenizer.token_bytes(token)
