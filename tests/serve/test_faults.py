"""What goes wrong, and what must not come of it."""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from openai import APIError, InternalServerError

from outrider import SamplingParams
from outrider.core.config import SpeculativeConfig
from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView
from outrider.executors.base import ForwardOutput, Segment
from outrider.serve.config import ServerConfig
from tests.serve.support import Running, begin, circling, endless, get, lively, open_llm, post, serving

BODY: dict[str, Any] = {"model": "tiny", "prompt": "The quick", "max_tokens": 30, "temperature": 0}


class Faulty(Drafter):
    """Raises in one round, drafts NaN in the next, a tree that is none in the third, and well in the fourth."""

    name = "faulty"

    def __init__(self, context: DrafterContext) -> None:
        self._rounds = 0

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        self._rounds += 1
        if self._rounds % 4 == 1:
            raise RuntimeError("a secret of the drafter")
        if self._rounds % 4 == 2:
            return [DraftTree([5], [-1], [math.nan]) for _ in views]
        if self._rounds % 4 == 3:
            return [DraftTree([5, 6], [1, 0]) for _ in views]
        return [DraftTree.chain([int(circling(view.tokens).argmax())]) if view.room else DraftTree() for view in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        if self._rounds % 8 == 5:
            raise RuntimeError("a secret of the drafter")


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_a_drafter_that_fails_costs_its_draft_and_nothing_else() -> None:
    config = SpeculativeConfig(method="faulty", num_speculative_tokens=4, adaptive=False)
    right = open_llm(circling, "none").generate("The quick", SamplingParams(max_tokens=30))[0].text
    with serving(open_llm(circling, config, drafters={"faulty": "tests.serve.test_faults:Faulty"})) as running:
        status, _, answer = post(running, "/v1/completions", BODY)
        assert (status, texts(answer)) == (200, [right])
        stats = answer["usage"]["speculative"]
        assert stats["failures"] >= 6
        assert stats["accepted"] >= 3, "speculation is back after each failure"
        assert running.metrics()["outrider:drafter_failures_total"] == stats["failures"]
        assert "secret" not in json.dumps(answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_executor_error_fails_that_batch_alone(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with serving(open_llm(endless)) as running, caplog.at_level(logging.CRITICAL, "outrider"):
        right = texts(post(running, "/v1/completions", BODY)[2])
        running.target.pause = 0.01
        client = running.client()
        streams = [client.completions.create(**BODY | {"max_tokens": 200}, stream=True) for _ in range(3)]
        for answer in streams:
            next(iter(answer))
        running.target.faults = 1
        for answer in streams:
            with pytest.raises(APIError, match="the engine failed") as raised:
                list(answer)
            assert "secret" not in str(raised.value)
        running.target.faults = 1
        with pytest.raises(InternalServerError, match="may be sent again"):
            client.completions.create(**BODY, stream=stream)
        running.target.pause = 0
        assert texts(post(running, "/v1/completions", BODY)[2]) == right
        assert running.settled()
        assert running.metrics()['outrider:request_success_total{finished_reason="error"}'] == 4


def test_requests_that_wait_outlive_the_batch_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    with serving(open_llm(endless, max_batch_size=1)) as running, caplog.at_level(logging.CRITICAL, "outrider"):
        right = texts(post(running, "/v1/completions", BODY)[2])
        running.target.pause = 0.01
        first = running.client().completions.create(**BODY | {"max_tokens": 200}, stream=True)
        next(iter(first))
        found: list[Any] = []
        second = threading.Thread(target=lambda: found.append(post(running, "/v1/completions", BODY)))
        second.start()
        while running.service.engine.in_flight < 2:
            time.sleep(0.01)
        running.target.faults = 1
        with pytest.raises(APIError):
            list(first)
        second.join(timeout=30)
        assert texts(found[0][2]) == right


def test_an_engine_that_fails_for_good_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    running_llm = open_llm(endless)
    with caplog.at_level(logging.CRITICAL, "outrider"), serving(running_llm) as running:
        running.target.faults = 10**9
        statuses = [post(running, "/v1/completions", BODY)[0] for _ in range(10)]
        assert statuses == [500] * 10
        running.thread.join(timeout=30)
        assert not running.thread.is_alive()
        assert running.server.exit_code == 1


def test_a_dead_engine_is_not_healthy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "outrider"), serving(open_llm()) as running:
        running.service.engine.on_death = lambda: None
        running.service.adapter.step = lambda: (_ for _ in ()).throw(SystemExit)  # type: ignore[method-assign]
        assert post(running, "/v1/completions", BODY)[0] == 500
        assert get(running, "/health")[0] == get(running, "/ready")[0] == 503
        assert post(running, "/v1/completions", BODY)[0] == 500
        assert running.metrics()


def test_a_request_that_the_engine_loses_does_not_hang(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "outrider"), serving(open_llm()) as running:
        submit = running.service.adapter.submit
        running.service.adapter.submit = lambda request: None  # type: ignore[method-assign]
        assert post(running, "/v1/completions", BODY)[0] == 500
        running.service.adapter.submit = submit  # type: ignore[method-assign]
        assert post(running, "/v1/completions", BODY)[0] == 200


def test_fifty_of_a_hundred_clients_are_killed(caplog: pytest.LogCaptureFixture) -> None:
    right = open_llm(lively, "none").generate("The quick", SamplingParams(max_tokens=60, ignore_eos=True))[0].text
    with serving(open_llm(lively), request_timeout=120) as running:
        running.target.pause = 0.002
        body = {**BODY, "max_tokens": 60, "ignore_eos": True}
        rng = random.Random(7)
        kill = [True] * 50 + [False] * 50
        rng.shuffle(kill)
        answers: list[str] = []
        lock = threading.Lock()

        def run(killed: bool, stream: bool, patience: float) -> None:
            connection = begin(running, {**body, "stream": stream})
            if killed:
                time.sleep(patience)
                connection.close()
                return
            data = connection.getresponse().read()
            connection.close()
            events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
            text = "".join(texts(event)[0] for event in events) if stream else texts(json.loads(data))[0]
            with lock:
                answers.append(text)

        threads = [
            threading.Thread(target=run, args=(killed, number % 3 > 0, rng.random() * 0.5))
            for number, killed in enumerate(kill)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert answers == [right] * 50
        assert running.settled()
        samples = running.metrics()
        assert samples['outrider:request_success_total{finished_reason="length"}'] >= 50
        assert samples['outrider:request_success_total{finished_reason="aborted"}'] >= 20


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_place_within_one_round(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(open_llm(endless, max_batch_size=1)) as running:
        passes: list[list[int]] = []
        forward = running.target.forward

        def recorded(segments: Sequence[Segment], *given: Any) -> ForwardOutput:
            passes.append([segment.seq for segment in segments])
            return forward(segments, *given)

        monkeypatch.setattr(running.target, "forward", recorded)
        running.target.pause = 0.1
        leaving = begin(running, {**BODY, "max_tokens": 200, "stream": stream})
        while not passes:
            time.sleep(0.005)
        waiting = begin(running, {**BODY, "max_tokens": 2})
        while running.service.engine.in_flight < 2:
            time.sleep(0.005)
        leaves, before = passes[0], len(passes)
        leaving.close()
        assert waiting.getresponse().status == 200
        waiting.close()
        assert running.settled()
        # The round that was under way, and one more if it ended just as the client left.
        late = [seqs for seqs in passes[before:] if seqs == leaves]
        assert len(late) <= 2, "it must not run to its end"
        assert passes[before + len(late)] != leaves, "the one that waited has its place"


def test_an_idle_server_does_nothing() -> None:
    with serving(open_llm()) as running:
        post(running, "/v1/completions", BODY)
        assert running.settled()
        calls = []
        step = running.service.adapter.step
        running.service.adapter.step = lambda: calls.append(1) or step()  # type: ignore[method-assign,func-returns-value]
        time.sleep(0.3)
        assert calls == []


def test_a_round_that_never_ends_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.serve.async_engine._LAST_ROUND", 0.3)
    never = threading.Event()
    running = Running(open_llm(), ServerConfig(port=0))
    monkeypatch.setattr(running.target, "forward", lambda *given: never.wait())
    connection = begin(running, {"model": "tiny", "prompt": "x", "max_tokens": 2})
    while not running.service.engine.in_flight:
        threading.Event().wait(0.01)
    assert running.stop() != 0
    connection.close()
    never.set()


def test_what_nobody_foresaw_is_a_500_that_tells_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last handler of all: an error that is none of ours, outside the engine."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret of the server")

    with monkeypatch.context() as patch:
        patch.setattr(server.service.adapter, "encode_chat", fails)
        for path, asked in (("/v1/chat/completions", body), ("/tokenize", {"messages": body["messages"]})):
            status, _, answer = post(server, path, asked)
            assert status == 500
            assert answer["error"]["type"] == "server_error"
            assert "secret" not in json.dumps(answer)
    assert post(server, "/v1/chat/completions", body)[0] == 200
