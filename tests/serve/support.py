"""A server over the fake target: real HTTP, real tokenizer, logits that are a function of the text alone."""

from __future__ import annotations

import functools
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.drafters import DRAFTERS
from outrider.drafters.base import DrafterContext
from outrider.drafters.eagle import EagleDrafter
from outrider.engine.llm import LLM
from outrider.executors import EXECUTORS
from outrider.executors.base import ForwardOutput, Segment
from outrider.models.chat import ChatTemplate
from outrider.models.loader import Model
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import TensorWeights
from outrider.serve.config import ServerConfig
from outrider.serve.server import Server
from tests.support.fake_heads import FakeHeadExecutor, encoded, fake_head
from tests.support.fakes import FakeExecutor, fake_config
from tests.support.tokenizers import trained

CONTEXT = 256
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Logits = Callable[[Sequence[int]], torch.Tensor]


@functools.cache
def tokenizer() -> Tokenizer:
    backend = trained("qwen2")
    end = backend.token_to_id("<|im_end|>")
    return Tokenizer(backend, end_ids=(end,), chat_template=ChatTemplate(TEMPLATE, {}), where="tests")


@functools.cache
def model() -> Model:
    own = tokenizer()
    config = fake_config(vocab_size=own.vocab_size, max_position=CONTEXT, eos_token_ids=own.end_ids)
    return Model("tiny", config, TensorWeights({"model.norm.weight": torch.full((8,), 0.7)}), own)


@functools.cache
def readable() -> list[int]:
    """Tokens that are whole characters, none of them special."""
    own = tokenizer()

    def is_text(token: int) -> bool:
        try:
            return own.token_bytes(token).decode().isprintable()
        except UnicodeDecodeError:
            return False

    return [token for token in range(own.vocab_size) if token not in own.special_ids and is_text(token)]


@functools.cache
def unreadable() -> list[int]:
    """Tokens that are not `readable` and end nothing either."""
    others = {*readable(), *tokenizer().end_ids}
    return [token for token in range(tokenizer().vocab_size) if token not in others]


def unlikely(characters: str) -> dict[str, float]:
    """A ``logit_bias`` against the tokens that consist of these characters alone."""
    texts = {token: tokenizer().token_bytes(token).decode() for token in readable()}
    return {str(token): -20.0 for token, text in texts.items() if not text.strip(characters)}


@functools.lru_cache(maxsize=4096)  # bounded, or a soak would see it grow
def _row(key: tuple[int, ...]) -> torch.Tensor:
    row = np.random.default_rng(key).normal(size=tokenizer().vocab_size) * 3
    row[unreadable()] -= 30
    return torch.tensor(row, dtype=torch.float32)


def lively(history: Sequence[int]) -> torch.Tensor:
    """Logits that depend on the last two tokens; the text runs on until an end token comes up."""
    return _row(tuple(history[-2:]))


def endless(history: Sequence[int]) -> torch.Tensor:
    """`lively`, without an end."""
    logits = lively(history).clone()
    logits[list(tokenizer().end_ids)] = -50
    return logits


def circling(history: Sequence[int]) -> torch.Tensor:
    """A text that goes round in a circle of 20 tokens, so that drafters find what comes next."""
    circle = readable()[100:120]
    at = circle.index(history[-1]) if history[-1] in circle else -1
    logits = lively(history).clone()
    logits[circle[(at + 1) % 20]] += 60
    return logits


class Target(FakeExecutor):
    """The fake executor with a pace, and with faults on demand. Its last hidden state tells the last two tokens."""

    def __init__(self, logits: Logits, *, kv_tokens: int, max_context: int) -> None:
        super().__init__(
            logits,
            kv_tokens=kv_tokens,
            max_context=max_context,
            hidden=lambda _, history: encoded(history, tokenizer().vocab_size),
        )
        self.pause = 0.0
        self.faults = 0

    def forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int] = (), features: torch.Tensor | None = None
    ) -> ForwardOutput:
        time.sleep(self.pause)
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a secret from the inside of the executor")
        return super().forward(segments, hidden_layers, features)

    def open_head(self, model: Model, *, kv_tokens: int, max_context: int) -> FakeHeadExecutor:
        return FakeHeadExecutor(model.config, self._logits, kv_tokens=kv_tokens, max_context=max_context)


class Eagle(EagleDrafter):
    """EAGLE with a head that is right as often as its features are those of the text."""

    def __init__(self, context: DrafterContext) -> None:
        target = context.target.config
        super().__init__(context, fake_head("eagle", target.max_position, target.vocab_size))


_LOGITS: dict[str, Logits] = {}


def open_target(model: Model, *, kv_tokens: int, max_context: int, **_: object) -> Target:
    """What the registry builds under the name ``fake``."""
    return Target(_LOGITS["now"], kv_tokens=kv_tokens, max_context=max_context)


def open_llm(
    logits: Logits = lively,
    config: SpeculativeConfig | str = "ngram",
    *,
    drafters: dict[str, str] | None = None,
    of: Model | None = None,
    **sizes: Any,
) -> LLM:
    """An LLM over the fake target. drafters: names that stand for "module:attribute" while it is built. of: another
    model than `model`.
    """
    engine_config = EngineConfig(**{"max_context": CONTEXT, "kv_tokens": 16 * CONTEXT, "prefill_chunk": 64, **sizes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_LOGITS, "now", logits)
        patch.setitem(EXECUTORS._entries, "fake", "tests.serve.support:open_target")
        for name, target in (drafters or {}).items():
            patch.setitem(DRAFTERS._entries, name, target)
        return LLM(of or model(), config, executor="fake", engine_config=engine_config)


class Running:
    """A server in a thread of its own, and the way to reach it."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm = llm
        self.server = Server(llm, config)
        self.service = self.server._service
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def target(self) -> Target:
        executor = self.llm.executor
        assert isinstance(executor, Target)
        return executor

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 60, **options})

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by name and labels as they are written."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def settled(self) -> bool:
        """Wait until nothing runs; whether that came about, and every sequence was given back."""
        for _ in range(1000):
            if not self.service.engine.in_flight:
                break
            time.sleep(0.01)
        return not self.service.engine.in_flight and self.target.open_sequences == 0

    def stop(self) -> int:
        self.server.should_exit = True
        self.thread.join(timeout=30)
        assert not self.thread.is_alive(), "the server did not end"
        return self.server.exit_code


@contextmanager
def serving(llm: LLM | None = None, **settings: Any) -> Iterator[Running]:
    """A running server; every field of `ServerConfig` may be given."""
    running = Running(llm or open_llm(), ServerConfig(**{"port": 0, **settings}))
    try:
        yield running
    finally:
        running.stop()


def post(
    running: Running, path: str, body: bytes | dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    """Status, headers (names in lower case) and parsed body of a request, whatever the status."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        running.url + path, data, {"Content-Type": "application/json", **(headers or {})}, method="POST"
    )
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read()
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, json.loads(text) if text else None


def get(running: Running, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and parsed body."""
    request = urllib.request.Request(running.url + path, headers=headers or {})
    try:
        answer = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read()
        return answer.status, json.loads(text) if text else None


def begin(running: Running, body: dict[str, Any]) -> http.client.HTTPConnection:
    """A connection over which a completion was asked for, its answer not read yet."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection
