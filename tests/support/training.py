"""A small random model that can chat: what training commands need of a target, without waiting for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.models.chat import ChatTemplate
from outrider.models.loader import Model
from outrider.models.tokenizer import Tokenizer
from tests.support.models import random_model
from tests.support.tokenizers import trained

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template: str | None = CHATML) -> Tokenizer:
    backend = trained("smollm")
    end = backend.token_to_id("<|im_end|>")
    return Tokenizer(backend, end_ids=(end,), chat_template=ChatTemplate(template, {}) if template else None)


def chat_model(template: str | None = CHATML, *, seed: int = 0, **overrides: Any) -> Model:
    """`random_model` with the vocabulary of `chat_tokenizer`; a text that it writes is noise, but always the same."""
    tokenizer = chat_tokenizer(template)
    shape = {"vocab_size": tokenizer.vocab_size, "eos_token_ids": tokenizer.end_ids, "bos_token_id": None}
    model = random_model("llama", seed=seed, **(shape | overrides))
    return replace(model, tokenizer=tokenizer)
