"""/metrics: it agrees with what clients were told, and tells nothing of who they are."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from outrider.core.config import SpeculativeConfig
from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, SequenceView
from outrider.engine.price import ForwardPrice
from outrider.executors.base import CostCurve
from tests.serve.support import Running, begin, circling, endless, open_llm, post, readable, serving

SHARED = [
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_bucket", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
]
"""Names that vLLM's dashboards know, after their prefix."""

CONFIG = SpeculativeConfig(method="ngram+suffix", num_speculative_tokens=6, adaptive=False)


def wait_for(running: Running, name: str, value: float) -> None:
    until = time.monotonic() + 30
    while running.metrics()[name] != value:
        assert time.monotonic() < until, f"{name} never was {value}"
        time.sleep(0.01)


def test_the_metrics_agree_with_the_sum_of_usage() -> None:
    with serving(open_llm(circling, CONFIG)) as running:
        used: list[dict[str, Any]] = []
        for number in range(6):
            body = {"model": "tiny", "prompt": ["a b", "c"][: 1 + number % 2], "n": 1 + number % 3, "seed": number}
            status, _, answer = post(running, "/v1/completions", {**body, "max_tokens": 20 + 10 * number})
            assert status == 200
            used.append(answer["usage"])
        assert running.settled()
        found = running.metrics()
        stats = [usage["speculative"] for usage in used]
        assert found["outrider:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in used)
        assert found["outrider:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in used)
        assert found["outrider:spec_decode_num_draft_tokens_total"] == sum(s["drafted"] for s in stats) > 0
        assert found["outrider:spec_decode_num_accepted_tokens_total"] == sum(s["accepted"] for s in stats) > 0
        for position in range(3):
            name = f'outrider:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
            assert found[name] == sum((s["accepted_by_position"] + [0] * 6)[position] for s in stats)
        for drafter in ("ngram", "suffix"):
            for count, source in (("draft", "drafted_by_source"), ("accepted", "accepted_by_source")):
                name = f'outrider:drafter_num_{count}_tokens_total{{drafter="{drafter}"}}'
                assert found[name] == sum(s[source].get(drafter, 0) for s in stats)
            depths = [
                count
                for name, count in found.items()
                if name.startswith(f'outrider:drafter_num_accepted_tokens_per_pos_total{{drafter="{drafter}"')
            ]
            assert sum(depths) == found[f'outrider:drafter_num_accepted_tokens_total{{drafter="{drafter}"}}'] > 0
        for name in ("draft_seconds", "verify_seconds", "accept_seconds"):
            assert found[f"outrider:{name}_total"] == pytest.approx(sum(s[name] for s in stats))


def test_every_answer_is_timed_once() -> None:
    with serving(open_llm(circling, CONFIG)) as running:
        for n in (1, 2):
            post(running, "/v1/completions", {"model": "tiny", "prompt": "x", "n": n, "max_tokens": 20})
        assert running.settled()
        found = running.metrics()
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert found[f"outrider:{name}_seconds_count"] == 3
        tokens = found["outrider:generation_tokens_total"]
        assert found["outrider:inter_token_latency_seconds_count"] == tokens - 3
        assert found["outrider:inter_token_latency_seconds_sum"] < found["outrider:e2e_request_latency_seconds_sum"]
        assert found["outrider:request_queue_time_seconds_sum"] < found["outrider:time_to_first_token_seconds_sum"]


def test_those_who_never_got_a_place_have_waited_as_well() -> None:
    with serving(open_llm(endless, max_batch_size=1)) as running:
        running.target.pause = 0.02
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2000}
        first = begin(running, body)
        wait_for(running, "outrider:num_requests_running", 1)
        others = [begin(running, body) for _ in range(2)]
        wait_for(running, "outrider:num_requests_waiting", 2)
        time.sleep(0.3)
        for client in others:
            client.close()
        wait_for(running, "outrider:num_requests_waiting", 0)
        found = running.metrics()
        assert found["outrider:time_to_first_token_seconds_count"] == 1
        assert found["outrider:request_queue_time_seconds_count"] == 3
        assert found["outrider:request_queue_time_seconds_sum"] > 0.6, "two have waited until the end"
        assert found["outrider:e2e_request_latency_seconds_count"] == 2
        first.close()
        assert running.settled()


def test_waiting_ends_with_a_place_and_not_with_the_first_token() -> None:
    with serving(open_llm(endless, "none", prefill_chunk=16)) as running:
        running.target.pause = 0.1
        client = begin(running, {"model": "tiny", "prompt": [readable()[0]] * 200, "max_tokens": 1})
        while not (found := running.metrics())["outrider:request_queue_time_seconds_count"]:
            time.sleep(0.01)
        assert found["outrider:time_to_first_token_seconds_count"] == 0
        client.close()
        assert running.settled()


class Failing(Drafter):
    """Never gets as far as a draft."""

    name = "failing"

    def __init__(self, context: DrafterContext) -> None:
        pass

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        raise RuntimeError("nothing comes to mind")


@pytest.mark.parametrize("method", ["failing", "ngram+failing"])
def test_failures_are_laid_at_the_right_door(method: str) -> None:
    config = SpeculativeConfig(method=method, num_speculative_tokens=6, adaptive=False)
    with serving(open_llm(circling, config, drafters={"failing": "tests.serve.test_metrics:Failing"})) as running:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 30}
        failures = post(running, "/v1/completions", body)[2]["usage"]["speculative"]["failures"]
        found = running.metrics()
        assert found["outrider:drafter_failures_total"] == failures > 0
        by_drafter = {name: n for name, n in found.items() if name.startswith("outrider:drafter_num_failures_total")}
        assert by_drafter == {'outrider:drafter_num_failures_total{drafter="failing"}': failures}


ROOM_FOR_16 = CostCurve((1, 16, 32), (1.0, 1.0, 3.0))
"""A machine that forwards up to 16 rows in the same time: beyond them no draft pays."""


class Watch:
    """What a scrape says that an earlier one did not."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._before = running.metrics()

    def __call__(self, name: str) -> float:
        return self._running.metrics()[f"outrider:{name}"] - self._before[f"outrider:{name}"]

    @property
    def depth(self) -> float:
        """Nodes let in for a request and round."""
        return self("planner_num_admitted_tokens_total") / self("planner_num_requests_total")


@contextmanager
def busy(running: Running, requests: int) -> Iterator[Watch]:
    """While so many requests are running."""
    running.target.pause = 0.3  # all of them arrive during the first rounds
    body = {"model": "tiny", "prompt": readable()[100:120] * 2, "max_tokens": 200, "temperature": 0}
    clients = [begin(running, body) for _ in range(requests)]
    while running.metrics()["outrider:num_requests_running"] < requests:
        time.sleep(0.01)
    running.target.pause = 0.01
    watch = Watch(running)
    while watch("rounds_total") < 10:
        time.sleep(0.01)
    yield watch
    assert running.metrics()["outrider:num_requests_running"] == requests, "the watch took too long"
    for client in clients:
        client.close()
    assert running.settled()


def test_how_deep_the_planner_goes_can_be_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep for one request, less for eight, and not at all once the batch fills the machine."""
    for name in ("observe", "observe_beside", "observe_chunk"):
        monkeypatch.setattr(ForwardPrice, name, lambda *_: None)
    llm = open_llm(circling, SpeculativeConfig(method="ngram", num_speculative_tokens=16), max_batch_size=16)
    monkeypatch.setattr(llm._runtime, "_cost_curve", ROOM_FOR_16)
    with serving(llm) as running:
        alone = Watch(running)
        body = {"model": "tiny", "prompt": readable()[100:120] * 2, "max_tokens": 150, "temperature": 0}
        assert post(running, "/v1/completions", body)[0] == 200
        assert running.settled()
        assert alone.depth > 10
        assert alone('planner_rounds_total{decision="speculative"}') == alone("spec_decode_num_drafts_total") > 0
        assert alone("planner_num_admitted_tokens_total") == alone("spec_decode_num_draft_tokens_total")
        with busy(running, 8) as eight:
            assert 0.5 < eight.depth <= 1
            assert running.metrics()["outrider:planner_budget"] == 8
        with busy(running, 16) as full:
            assert full.depth == 0
            assert full('planner_rounds_total{decision="speculative"}') == 0
            assert full('planner_round_draft_tokens_bucket{le="0.0"}') >= 10
            assert running.metrics()["outrider:planner_budget"] == 0
        proposed = running.metrics()["outrider:planner_num_proposed_tokens_total"]
        assert proposed > running.metrics()["outrider:planner_num_admitted_tokens_total"]


def test_the_names_are_those_that_dashboards_know() -> None:
    with serving(open_llm(circling, CONFIG)) as running:
        post(running, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 60})
        names = {sample.partition("{")[0] for sample in running.metrics()}
        assert {f"outrider:{name}" for name in SHARED} <= names
        assert all(name.startswith(("outrider:", "process_")) for name in names)


def test_running_requests_can_be_seen() -> None:
    with serving(open_llm(circling, "none", max_batch_size=1)) as running:
        running.target.pause = 0.02
        body = {"model": "tiny", "prompt": "x", "max_tokens": 200}
        clients = [begin(running, body) for _ in range(2)]
        while running.service.engine.in_flight < 2 or not running.target.open_sequences:
            time.sleep(0.01)
        found = running.metrics()
        assert (found["outrider:num_requests_running"], found["outrider:num_requests_waiting"]) == (1, 1)
        assert 0 < found["outrider:kv_cache_usage_perc"] < 1
        for client in clients:
            client.close()
        assert running.settled()
        assert running.metrics()["outrider:num_requests_running"] == 0


def test_no_label_tells_one_tenant_from_another() -> None:
    """What A and B sent appears nowhere, and B's requests add no label or sample that A's had not."""
    with serving(open_llm(circling, CONFIG), api_key=["key-of-a", "key-of-b"]) as running:
        samples = []
        for tenant in "ab":
            body = {
                **{"model": "tiny", "prompt": f"prompt of {tenant}", "max_tokens": 40, "seed": 1},
                **{"user": f"user of {tenant}", "cache_salt": f"salt of {tenant}"},
            }
            assert post(running, "/v1/completions", body, {"Authorization": f"Bearer key-of-{tenant}"})[0] == 200
            assert running.settled()
            samples.append(set(running.metrics()))
        assert samples[0] == samples[1]
        assert not any(" of " in name or "key-of" in name for name in samples[1])


def test_a_tenant_gains_nothing_from_what_another_said() -> None:
    """Suffix memories are per tenant: B's acceptance is the same whether or not A sent the very same text before."""

    def accepted(before: list[str]) -> int:
        config = SpeculativeConfig(method="suffix", num_speculative_tokens=6, adaptive=False)
        with serving(open_llm(config=config)) as running:
            body = {"model": "tiny", "prompt": "The quick", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            for salt in [*before, "b"]:
                answer = post(running, "/v1/completions", {**body, "cache_salt": salt})[2]
            found: int = answer["usage"]["speculative"]["accepted"]
            return found

    assert accepted([]) == accepted(["a"]) == accepted(["a", "", "c"])
    assert accepted(["b"]) > accepted([]), "the same tenant does gain, or the test would show nothing"


def test_openmetrics_is_spoken_where_it_is_asked_for() -> None:
    with serving(open_llm()) as running:
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        with urllib.request.urlopen(urllib.request.Request(f"{running.url}/metrics", headers=accept)) as answer:
            assert answer.headers["content-type"].startswith("application/openmetrics-text")
            assert answer.read().endswith(b"# EOF\n")
