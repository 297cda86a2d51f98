"""Tokenizers of Hugging Face folders: tokenizer.json and the settings beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from outrider.core.errors import ModelFileError, UnsupportedModelError
from outrider.models.loader import load_model
from outrider.models.tokenizer import tokenizer_from_folder
from tests.support.models import random_model, write_hf_folder
from tests.support.tokenizers import trained


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
