"""Over HTTP with the default model: whichever of its trained drafters is at work cannot be seen in the answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider import LLM
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.models.aliases import ALIASES
from outrider.models.fetch import fetch
from tests.serve.support import Running, serving
from tests.serve.test_invisible import PARAMETERS, ask

MODEL = "smollm2-135m"
METHODS = ["eagle3", "mtp", "medusa", "suffix+eagle3"]
STRUCTURED = {"regex", "grammar", "json_object", "json_schema"}
PROMPT = "One, two, three, four. Again: one, two,"
ASKED = [
    {"max_tokens": 64, **own} if "messages" in own else {"max_tokens": 64, "prompt": PROMPT, **own}
    for own in {**PARAMETERS, "stop": {"temperature": 0, "stop": ["four", "never there"]}}.values()
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """One server that has all of them, of which a request takes its choice; small, so that some have to make way."""
    fetch(ALIASES[MODEL], progress=False)
    config = SpeculativeConfig(method="suffix+eagle3+mtp+medusa", num_speculative_tokens=8, adaptive=False)
    sizes = EngineConfig(max_batch_size=8, max_context=192, kv_tokens=192, prefill_chunk=32)
    with serving(LLM(MODEL, config, engine_config=sizes)) as running:
        yield running


@pytest.mark.parametrize("method", METHODS)
def test_all_at_once_with_a_trained_drafter_is_one_by_one_without(running: Running, method: str) -> None:
    alone = [ask(running, own, {"method": "none"}, model=MODEL)[0] for own in ASKED]
    before = running.metrics()["outrider:num_preemptions_total"]
    with ThreadPoolExecutor(len(ASKED)) as pool:
        together = list(pool.map(lambda own: ask(running, own, {"method": method}, model=MODEL), ASKED))
    assert running.metrics()["outrider:num_preemptions_total"] > before, "some had to make way"
    for name, (found, statistics), plain in zip(PARAMETERS, together, alone, strict=True):
        assert found == plain, name
        assert statistics["failures"] == 0, name
    # Where there is no room beside a short text, nothing may be drafted for it.
    assert sum(statistics["drafted"] > 0 for _, statistics in together) > len(together) // 2


@pytest.mark.parametrize("method", METHODS)
def test_one_by_one_every_parameter_is_drafted_for(running: Running, method: str) -> None:
    """With room for it, that is. Of structures, some leave nothing open that could be drafted."""
    drafted = {}
    for name, own in zip(PARAMETERS, ASKED, strict=True):
        found, statistics = ask(running, own, {"method": method}, model=MODEL)
        assert found == ask(running, own, {"method": "none"}, model=MODEL)[0], name
        drafted[name] = statistics["drafted"]
    assert [name for name, number in drafted.items() if not number and name not in STRUCTURED] == []
    assert sum(drafted[name] for name in STRUCTURED) > 0
