"""One server for all tests that leave it as it was, and plain decoding to compare it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from outrider.core.config import SpeculativeConfig
from outrider.engine.llm import LLM
from tests.serve.support import Running, lively, open_llm, serving


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    config = SpeculativeConfig(method="suffix+recycle", num_speculative_tokens=8, adaptive=False)
    with serving(open_llm(lively, config)) as running:
        yield running
        assert running.settled()


@pytest.fixture(scope="package")
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture(scope="package")
def plain() -> LLM:
    """The same model, decoded without a server and without speculation."""
    return open_llm(lively, "none")
