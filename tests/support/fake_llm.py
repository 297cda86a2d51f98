"""An `LLM` over the fake target: the whole way from the command line to the text, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.engine.llm import LLM
from outrider.executors import EXECUTORS
from outrider.models.loader import Model
from tests.support.fakes import WORDS, FakeExecutor, WordTokenizer, fake_model, random_logits


class ChatTokenizer(WordTokenizer):
    """`WordTokenizer` with a chat template: turns one after the other, each ended by ``!``."""

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(c) if c in WORDS else 0 for c in text.lower()]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{message['content']}!" for message in messages))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(WORDS[token] for token in tokens)


def chat_model() -> Model:
    model = fake_model(max_position=512)
    return Model(model.name, model.config, model.weights, ChatTokenizer())  # type: ignore[arg-type]


def open_fake(model: Model, *, kv_tokens: int, max_context: int, **_: object) -> FakeExecutor:
    """What the registry builds under the name ``fake``."""
    return FakeExecutor(FAKE["logits"], kv_tokens=kv_tokens, max_context=max_context)


FAKE: dict[str, Callable[[Sequence[int]], torch.Tensor]] = {"logits": random_logits}


def repetitive_logits(history: Sequence[int]) -> torch.Tensor:
    """A target that counts through the alphabet again and again, so that drafters have something to find."""
    logits = random_logits(history, scale=0.5)
    logits[3 + (history[-1] - 2) % 20] += 20
    return logits


def use_fakes(monkeypatch: pytest.MonkeyPatch, logits: Callable[[Sequence[int]], torch.Tensor] = random_logits) -> None:
    """Let every model name stand for the fake model, and ``--executor fake`` for an executor with these logits."""
    monkeypatch.setitem(FAKE, "logits", logits)
    monkeypatch.setitem(EXECUTORS._entries, "fake", "tests.support.fake_llm:open_fake")
    monkeypatch.setattr("outrider.models.loader.load_model", lambda name, progress: chat_model())


def fake_llm(config: SpeculativeConfig | str = "ngram") -> LLM:
    """An LLM over the fakes; call `use_fakes` first."""
    return LLM(chat_model(), config, executor="fake", engine_config=EngineConfig(max_context=256))
