"""A small random model that can chat: what training commands need of a target, without waiting for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.config import EngineConfig
from outrider.engine.llm import LLM
from outrider.executors import EXECUTORS
from outrider.executors.base import ForwardOutput, Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.chat import ChatTemplate
from outrider.models.loader import Model
from outrider.models.tokenizer import Tokenizer
from tests.support.fake_executor import FakeExecutor
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


@cache
def _words(end: float) -> torch.Tensor:
    """Logits that leave a text readable: no broken characters, and no control token but the one that ends a turn."""
    tokenizer = chat_tokenizer()
    logits = torch.full((tokenizer.vocab_size,), -1e4)
    for token in range(tokenizer.vocab_size):
        if tokenizer.token_bytes(token).strip().isalpha():
            logits[token] = 0.0
    logits[list(tokenizer.special_ids)] = -1e4
    logits[list(tokenizer.end_ids)] = end
    return logits


def wordy_logits(history: Sequence[int]) -> torch.Tensor:
    """Logits of a target that talks nonsense and comes to an end: a function of the last three tokens."""
    words = _words(3.0)
    noise = np.random.default_rng(tuple(history[-3:])).normal(size=len(words), scale=2.0)
    return words + torch.from_numpy(noise).float()


def open_wordy(model: Model, *, kv_tokens: int, max_context: int, **_: object) -> FakeExecutor:
    return FakeExecutor(model.config, wordy_logits, kv_tokens=kv_tokens, max_context=max_context)


def wordy_llm(template: str | None = CHATML, context: int = 128) -> LLM:
    """An `LLM` over `wordy_logits`, without speculation."""
    sizes = EngineConfig(max_context=context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXECUTORS._entries, "wordy", "tests.support.training:open_wordy")
        return LLM(chat_model(template), "none", executor="wordy", engine_config=sizes)


class WordyExecutor(TorchExecutor):
    """A random model whose text is made of words and comes to an end, for what needs its hidden states as well."""

    def forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int] = (), features: torch.Tensor | None = None
    ) -> ForwardOutput:
        output = super().forward(segments, hidden_layers, features)
        return replace(output, logits=2 * output.logits + _words(1.5))


def use_wordy_model(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Model:
    """Let every model name stand for the model that is returned, and ``--executor worded`` for a `WordyExecutor`."""
    model = chat_model(seed=seed, num_layers=7, hidden_size=32, num_heads=2, num_kv_heads=1, max_position=256)
    monkeypatch.setitem(EXECUTORS._entries, "worded", "tests.support.training:WordyExecutor")
    monkeypatch.setattr("outrider.models.loader.load_model", lambda name, progress: model)
    return model
