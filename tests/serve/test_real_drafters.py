"""Over HTTP with the default model: whichever of its trained drafters is at work cannot be seen in the answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider import LLM
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.models.aliases import ALIASES
from outrider.models.fetch import fetch
from tests.serve.support import Running, post, serving
from tests.serve.test_invisible import PARAMETERS

MODEL = "smollm2-135m"
METHODS = ["eagle3", "mtp", "medusa", "suffix+eagle3"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """One server that has all of them, of which a request takes its choice; small, so that some have to make way."""
    fetch(ALIASES[MODEL], progress=False)
    config = SpeculativeConfig(method="suffix+eagle3+mtp+medusa", num_speculative_tokens=8, adaptive=False)
    sizes = EngineConfig(max_batch_size=8, max_context=512, kv_tokens=512, prefill_chunk=32)
    with serving(LLM(MODEL, config, engine_config=sizes)) as running:
        yield running


def choices(running: Running, own: dict[str, Any], method: str) -> tuple[Any, int]:
    """The answers, and how many draft tokens were verified for them."""
    asked = {"model": MODEL, "prompt": "One, two, three, four. Again: one, two,", "max_tokens": 32, "seed": 7, **own}
    status, _, answer = post(running, "/v1/completions", {**asked, "speculative": {"method": method}})
    assert status == 200, answer
    statistics = answer["usage"]["speculative"]
    assert not statistics.get("failures")
    return answer["choices"], statistics["drafted"]


@pytest.mark.parametrize("method", METHODS)
def test_all_at_once_with_a_trained_drafter_is_one_by_one_without(running: Running, method: str) -> None:
    alone = [choices(running, own, "none")[0] for own in PARAMETERS.values()]
    with ThreadPoolExecutor(len(PARAMETERS)) as pool:
        together = list(pool.map(lambda own: choices(running, own, method), PARAMETERS.values()))
    for name, (found, drafted), plain in zip(PARAMETERS, together, alone, strict=True):
        assert found == plain, name
        assert drafted > 0 or name == "stop", name  # which ends with the first token
