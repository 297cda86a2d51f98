"""The ``speculative`` and ``priority`` fields."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.serve.support import Running, begin, endless, open_llm, post, serving

HELLO = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": "tiny", "prompt": "a b a b a b", "max_tokens": 60, "temperature": 0}


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "recycle", "suffix+recycle", "ngram+recycle"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_request_chooses_its_method_and_keeps_its_text(server: Running, method: str, seed: int | None) -> None:
    own = BODY if seed is None else {**BODY, "temperature": 1.0, "seed": seed}
    plain = post(server, "/v1/completions", {**own, "speculative": {"method": "none"}})[2]
    status, _, answer = post(server, "/v1/completions", {**own, "speculative": {"method": method}})
    assert status == 200
    assert answer["choices"] == plain["choices"] or seed is None
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
    assert plain["usage"]["speculative"]["drafted"] == 0
    assert set(answer["usage"]["speculative"]["drafted_by_source"]) <= set(method.split("+"))


def test_a_request_chooses_how_much(server: Running) -> None:
    one = post(server, "/v1/completions", {**BODY, "speculative": {"num_speculative_tokens": 1}})[2]
    stats = one["usage"]["speculative"]
    assert 0 < stats["drafted"] <= stats["rounds"]


@pytest.mark.parametrize("method", ["nothing", "draft_model", "none+ngram", "sufix"])
def test_a_method_that_cannot_be_had(client: OpenAI, method: str) -> None:
    with pytest.raises(BadRequestError):
        client.completions.create(**BODY, extra_body={"speculative": {"method": method}})


def order_of_ending(running: Running, priorities: list[int | None]) -> list[int | None]:
    """Priorities in the order in which their requests are through, all but the first of which wait for it."""
    client = running.client()
    ended: list[int | None] = []

    def ask(priority: int | None) -> None:
        extra = {} if priority is None else {"priority": priority}
        assert client.completions.create(model="tiny", prompt="a", max_tokens=4, extra_body=extra).choices
        ended.append(priority)

    running.target.pause = 0.1
    first = begin(running, {"model": "tiny", "prompt": "a", "max_tokens": 200})
    while not running.target.open_sequences:
        time.sleep(0.005)
    with ThreadPoolExecutor(len(priorities)) as pool:
        answers = []
        for number, priority in enumerate(priorities, start=2):
            answers.append(pool.submit(ask, priority))
            while running.service.engine.in_flight < number:
                time.sleep(0.005)
        running.target.pause = 0.02
        first.close()
        for answer in answers:
            answer.result()
    assert running.settled()
    return ended


def test_a_lower_priority_is_served_first() -> None:
    with serving(open_llm(endless, "none", max_batch_size=1), min_priority=-5) as running:
        assert order_of_ending(running, [5, None, 7, -5, 0]) == [-5, None, 0, 5, 7]


def test_clients_step_back_but_not_ahead_of_others() -> None:
    with serving(open_llm(endless, "none", max_batch_size=1)) as running:
        assert order_of_ending(running, [1, None]) == [None, 1]
        with pytest.raises(BadRequestError, match="priority -1 is below the 0") as refused:
            running.client().completions.create(model="tiny", prompt="a", max_tokens=1, extra_body={"priority": -1})
        assert refused.value.param == "priority"


def test_the_lowest_priority_is_the_servers_to_set() -> None:
    with serving(min_priority=-3) as running:
        for endpoint, own in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
            body = {"model": "tiny", "max_tokens": 1, **own}
            found = [
                post(running, f"/v1/{endpoint}", {**body, "priority": p})[0] for p in (-3, -4, -(2**31), 2**31 - 1)
            ]
            assert found == [200, 400, 400, 200]
