"""/metrics: it agrees with what clients were told, and tells nothing of who they are."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import pytest

from outrider.core.config import SpeculativeConfig
from tests.serve.support import begin, circling, open_llm, post, serving

SHARED = [
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_queue_time_seconds_bucket", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
]
"""Names that vLLM's dashboards know, after their prefix."""

CONFIG = SpeculativeConfig(method="ngram+suffix", num_speculative_tokens=6, adaptive=False)


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
