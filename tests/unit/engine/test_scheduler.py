"""Who runs, with how many rows, and who makes way."""

from __future__ import annotations

import pytest

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.drafters.none import NoDrafter
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.executors.base import CostCurve
from tests.support.fakes import ChaosDrafter, FakeExecutor, make_engine, run

PAGE = 4
MACHINE = CostCurve((1, 8, 64, 128), (1.0, 1.1, 2.0, 4.0))


def engine_of(
    *, drafts: bool = False, kv_tokens: int = 4096, price: CostCurve | None = MACHINE, **sizes: int
) -> tuple[Engine, FakeExecutor]:
    executor = FakeExecutor(kv_tokens=kv_tokens, page_size=PAGE)
    drafter = ChaosDrafter(1) if drafts else NoDrafter(None)  # type: ignore[arg-type]
    config = SpeculativeConfig(num_speculative_tokens=8, adaptive=not drafts)
    engine_config = EngineConfig(enable_prefix_caching=False, **sizes)
    return make_engine(drafter, config=config, executor=executor, engine_config=engine_config, price=price), executor


def ask(engine: Engine, prompt: int, tokens: int, priority: int = 0) -> Request:
    return engine.add([5] * prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), priority=priority)


def order_of_ending(engine: Engine, requests: list[Request]) -> list[Request]:
    ended: list[Request] = []
    for _ in range(2000):
        ended.extend(request for request in engine.step() if request.finished)
        if len(ended) == len(requests):
            return ended
    raise AssertionError("requests did not end")


def test_lower_priority_numbers_run_first_and_equals_in_order_of_arrival() -> None:
    engine, _ = engine_of(max_batch_size=1)
    requests = [ask(engine, 3, 4, priority) for priority in (1, 0, 1, -5, 0)]
    assert order_of_ending(engine, requests) == [requests[i] for i in (3, 1, 4, 0, 2)]


def test_a_long_prompt_does_not_keep_short_ones_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of(price=MACHINE)
    monkeypatch.setattr(engine._planner, "observe_forward", lambda *_, **__: None)
    running = ask(engine, 2, 400)
    engine.step()
    long = ask(engine, 480, 4)
    engine.step()
    short = [ask(engine, 6, 4) for _ in range(4)]
    ended = order_of_ending(engine, [running, long, *short])
    assert set(ended[:4]) == set(short)
    assert ended[4] is long, "nor do short ones keep it waiting"


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of(price=MACHINE)
    monkeypatch.setattr(engine._planner, "observe_forward", lambda *_, **__: None)
    ask(engine, 2, 500)
    engine.step()
    long = ask(engine, 480, 4)
    for _ in range(260):  # half of a chunk of four rows at a time
        ask(engine, 30, 1)
        engine.step()
    assert long.finished


def test_drafts_do_not_starve_a_prompt_in_a_tight_budget() -> None:
    engine, _ = engine_of(drafts=True, max_batch_size=2, max_batched_tokens=2)
    running = ask(engine, 2, 400)
    engine.step()
    prompt = ask(engine, 20, 2)
    for _ in range(30):
        engine.step()
    assert prompt.finished
    assert not running.finished


def test_a_chunk_beside_decoding_requests_keeps_the_round_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the curve a plain round of one row takes 1.0; with a chunk it may take up to 1.5, not two."""
    engine, executor = engine_of(price=MACHINE)
    monkeypatch.setattr(engine._planner, "observe_forward", lambda *_, **__: None)
    running = ask(engine, 2, 400)
    engine.step()
    ask(engine, 480, 2)
    executor.largest_pass = 0
    before = len(running.output.token_ids)
    for _ in range(8):
        engine.step()
    assert len(running.output.token_ids) == before + 8, "not a round without a token"
    assert 16 < executor.largest_pass < 64


def test_a_prompt_alone_takes_whole_chunks() -> None:
    engine, executor = engine_of(prefill_chunk=200)
    ask(engine, 480, 2)
    sizes = []
    for _ in range(3):
        before = executor.rows
        engine.step()
        sizes.append(executor.rows - before)
    assert sizes == [200, 200, 80]


def test_rows_never_exceed_the_budget() -> None:
    engine, executor = engine_of(drafts=True, max_batched_tokens=24, max_batch_size=12, price=None)
    requests = [ask(engine, 1 + 7 * n, 20) for n in range(12)]
    run(engine, requests)
    assert executor.largest_pass <= 24
    assert engine.stats.num_draft_tokens > 0


def test_the_newest_of_the_lowest_priority_makes_way_and_comes_back() -> None:
    engine, _ = engine_of(kv_tokens=64, max_batch_size=4)
    requests = [ask(engine, 10, 30, priority) for priority in (0, 0, 1, 0)]
    ended = order_of_ending(engine, requests)
    preempted = [request.preemptions for request in requests]
    assert preempted[0] == 0, "the oldest of the highest priority is never in anybody's way"
    assert preempted[2] >= preempted[1]
    assert sum(preempted) == engine.stats.preemptions > 0
    assert ended[0] is requests[0]
    assert ended[-1] is requests[2]


def test_draft_rows_shrink_before_anyone_makes_way() -> None:
    """Room for the texts of both to their end, and for hardly a draft row: nobody has to wait."""
    engine, _ = engine_of(drafts=True, kv_tokens=2 * 40, max_batch_size=2, price=None)
    requests = [ask(engine, 10, 30) for _ in range(2)]
    run(engine, requests)
    assert engine.stats.preemptions == 0
    assert engine.stats.num_accepted_tokens > 0


def test_a_request_that_needs_all_of_the_memory_is_served() -> None:
    engine, executor = engine_of(drafts=True, kv_tokens=64, max_batch_size=3, price=None)
    requests = [ask(engine, 60, 4), ask(engine, 5, 3), ask(engine, 2, 62)]
    run(engine, requests)
    assert [len(request.output.token_ids) for request in requests] == [4, 3, 62]
    assert executor.free_tokens == 64


def test_kv_is_taken_as_it_is_needed() -> None:
    """Eight requests that may come to need 40 tokens each run together in room for 160, while they are short."""
    engine, _ = engine_of(kv_tokens=160, max_batch_size=8)
    for _ in range(8):
        ask(engine, 4, 36)
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (8, 0)
    assert 0 < engine.stats.kv_tokens_used <= engine.stats.kv_tokens_total == 160


def test_an_aborted_request_leaves_at_once() -> None:
    engine, executor = engine_of(kv_tokens=64, max_batch_size=2)
    first, second, third = (ask(engine, 10, 30) for _ in range(3))
    engine.step()
    engine.abort(third)
    engine.abort(first)
    assert (engine.stats.running, engine.stats.waiting) == (1, 0)
    run(engine, [second])
    assert executor.open_sequences == 0
