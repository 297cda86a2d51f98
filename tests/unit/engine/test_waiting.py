"""Clients take turns, whatever one of them has queued."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.drafters.none import NoDrafter
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from tests.support.fakes import FakeExecutor, make_engine


def engine_of(*, kv_tokens: int = 4096, max_batch_size: int = 1) -> Engine:
    return make_engine(
        NoDrafter(None),  # type: ignore[arg-type]
        config=SpeculativeConfig(method="none"),
        executor=FakeExecutor(kv_tokens=kv_tokens, page_size=4),
        engine_config=EngineConfig(enable_prefix_caching=False, max_batch_size=max_batch_size),
    )


def ask(engine: Engine, client: str, *, priority: int = 0, prompt: int = 3, tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = engine.new_request([5] * prompt, params, client, priority)
    engine.submit(request)
    return request


def order_of_start(engine: Engine, requests: Sequence[Request]) -> str:
    """Clients in the order in which their requests were started."""
    for _ in range(10_000):
        if all(request.finished for request in requests):
            return "".join(request.client for request in sorted(requests, key=lambda request: request.turn or 0))
        engine.step()
    raise AssertionError("requests did not end")


def test_a_long_queue_keeps_others_waiting_for_one_request() -> None:
    engine = engine_of()
    queued = [ask(engine, "a") for _ in range(100)]
    engine.step()
    other = ask(engine, "b")
    rounds = 0
    while other.turn is None:
        engine.step()
        rounds += 1
    assert rounds <= 2 * 4, "the one that runs, and one more of the first in line"
    assert sum(request.turn is not None for request in queued) <= 2


def test_clients_take_turns_and_keep_their_own_order() -> None:
    engine = engine_of()
    requests = [ask(engine, client) for client in "aaaabbbcc"]
    assert order_of_start(engine, requests) == "abcabcaba"
    for client in "abc":
        turns = [request.turn for request in requests if request.client == client]
        assert turns == sorted(turns, key=lambda turn: turn or 0)


def test_who_comes_back_stands_behind_those_who_wait() -> None:
    """A client that always has one more request at hand does not get more than its turn."""
    engine = engine_of()
    waiting = [ask(engine, "a") for _ in range(5)]
    quick = [ask(engine, "b")]
    for _ in range(200):
        engine.step()
        if quick[-1].turn is not None and len(quick) < 5:
            quick.append(ask(engine, "b"))
    assert order_of_start(engine, [*waiting, *quick]) == "ab" * 5


def test_priority_comes_before_turns() -> None:
    engine = engine_of()
    requests = [ask(engine, client, priority=priority) for client, priority in (("a", 1), ("b", 0), ("b", 0), ("a", 0))]
    assert order_of_start(engine, requests) == "baba"


def test_one_client_alone_is_served_in_order_of_arrival() -> None:
    engine = engine_of(max_batch_size=3)
    requests = [ask(engine, "a") for _ in range(9)]
    order_of_start(engine, requests)
    assert [request.turn for request in requests] == list(range(9))


def test_who_made_way_comes_back_before_those_that_never_ran() -> None:
    engine = engine_of(kv_tokens=64, max_batch_size=4)
    first = [ask(engine, "a", prompt=10, tokens=30) for _ in range(3)]
    while not any(request.preemptions for request in first):
        engine.step()
    late = ask(engine, "b", prompt=10, tokens=30)
    while late.turn is None:
        engine.step()
        assert late.turn is None or not any(r.seq is None and not r.finished for r in first)
    assert order_of_start(engine, [*first, late]) == "aaab"


@pytest.mark.parametrize("leaving", [0, 1, 3])
def test_who_leaves_the_line_changes_nothing_for_the_others(leaving: int) -> None:
    engine = engine_of()
    requests = [ask(engine, client) for client in "aabb"]
    engine.abort(requests[leaving])
    assert engine.stats.waiting == 3
    left = [request for request in requests if request is not requests[leaving]]
    assert order_of_start(engine, left) == {0: "abb", 1: "abb", 3: "aba"}[leaving]
    assert engine.stats.waiting == 0


def test_salts_of_one_client_share_its_turn() -> None:
    engine = engine_of()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [engine.new_request([5], params, f"a-{salt}", client="a") for salt in range(3)]
    requests.append(engine.new_request([5], params, "b", client="b"))
    for request in requests:
        engine.submit(request)
    assert order_of_start(engine, requests) == "abaa"
