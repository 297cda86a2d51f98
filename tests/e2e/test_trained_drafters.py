"""The drafters that come with the default model are trained for it: they guess right, and ``auto`` brings one along."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.core.config import SpeculativeConfig
from outrider.models.aliases import ALIASES
from outrider.models.fetch import fetch

MODEL = "smollm2-135m"
ASKED = (
    "Write a short letter to a friend about a walk by the sea.",
    "Explain why the sky is blue.",
    "Write a Python function that adds two numbers, and explain it.",
    "List five ways to save water at home.",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain() -> LLM:
    fetch(ALIASES[MODEL], progress=False)
    return LLM(MODEL, "none")


@pytest.mark.parametrize(("method", "least"), [("eagle3", 1.8), ("mtp", 1.7), ("medusa", 1.3)])
def test_a_trained_drafter_guesses_right(plain: LLM, method: str, least: float) -> None:
    """Tokens a round, greedy, with trees of 24 nodes; weights that are not its own give little more than 1."""
    llm = plain.with_speculation(SpeculativeConfig(method=method, num_speculative_tokens=24, adaptive=False))
    params = SamplingParams(temperature=0, max_tokens=64)
    conversations = [[{"role": "user", "content": text}] for text in ASKED]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    rounds = sum(output.statistics.rounds for output in outputs)
    assert sum(output.statistics.committed for output in outputs) / rounds > least


def test_auto_brings_the_best_one_along(plain: LLM) -> None:
    llm = plain.with_speculation(SpeculativeConfig(method="auto", adaptive=False))
    output = llm.generate("Once upon a time there was", SamplingParams(temperature=0, max_tokens=32))[0]
    assert output.statistics.drafted_by_source.get("eagle3", 0) > 0
