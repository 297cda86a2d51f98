"""Prometheus metrics, under the names that vLLM's dashboards know, after the prefix ``outrider:``.

Latencies and tokens are observed as answers are delivered; what the engine counts itself is read when it is scraped.
No label tells one client from another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.engine.stats import NODE_BUCKETS, EngineStats, PlanCounts

if TYPE_CHECKING:
    from outrider.serve.generation import Piece

PREFIX = "outrider:"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAPS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)

GAUGES = {
    "num_requests_running": ("running", "Requests in the batch"),
    "num_requests_waiting": ("waiting", "Requests that wait for a place in the batch"),
    "planner_budget": ("planner_budget", "Draft nodes that the planner allowed in the last round"),
}
COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "num_preemptions": ("preemptions", "Requests put back to waiting because the KV cache was full"),
    "spec_decode_num_drafts": ("num_drafts", "Drafts verified: one a request and round with anything to verify"),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens verified"),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens accepted and emitted"),
    "draft_seconds": ("draft_seconds", "Seconds in drafters"),
    "verify_seconds": ("verify_seconds", "Seconds in forward passes of the target, prefill included"),
    "accept_seconds": ("accept_seconds", "Seconds in acceptance and sampling"),
    "engine_seconds": ("engine_seconds", "Seconds in the rest of the rounds"),
    "drafter_failures": ("drafter_failures", "Drafts lost because a drafter failed"),
    "rounds": ("rounds", "Passes of the target over a batch"),
}
"""Name after the prefix -> field of `EngineStats`, and help."""

PLANS = {
    "planner_num_requests": ("requests", "Requests that could have been drafted for, summed over rounds"),
    "planner_num_proposed_tokens": ("proposed", "Draft nodes that drafters proposed"),
    "planner_num_admitted_tokens": ("admitted", "Draft nodes let into a round: the rest did not pay or found no room"),
}
"""Name after the prefix -> field of `PlanCounts`, and help. They count decisions, those of rounds that failed too."""

_DECISIONS = ("speculative", "declined", "plain")

_BY_DRAFTER = {
    "drafter_num_drafts": ("drafts", "Drafts verified that hold a token of this drafter"),
    "drafter_num_draft_tokens": ("draft_tokens", "Draft tokens verified, of this drafter"),
    "drafter_num_accepted_tokens": ("accepted_tokens", "Draft tokens accepted, of this drafter"),
}


class EngineCollector(Collector):
    """Exports the engine's own counters. ``stats`` is set before each scrape."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        for name, (source, text) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=getattr(stats, source))
        usage = stats.kv_tokens_used / stats.kv_tokens_total if stats.kv_tokens_total else 0.0
        text = "Share of the target's KV cache in use; 1 is all"
        yield GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", text, value=usage)
        for name, (source, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(stats, source))
        by_position = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted by depth in the draft tree; 0: children of the root",
            labels=["position"],
        )
        for position, count in enumerate(stats.accepted_per_pos):
            by_position.add_metric([str(position)], count)
        yield by_position
        yield from self._plans(stats.plans)
        yield from self._by_drafter(stats)

    def _plans(self, plans: PlanCounts) -> Iterator[Metric]:
        for name, (source, text) in PLANS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(plans, source))
        rounds = CounterMetricFamily(
            PREFIX + "planner_rounds",
            "Rounds by decision: drafts verified, all that was proposed declined, or nothing proposed",
            labels=["decision"],
        )
        for decision in _DECISIONS:
            rounds.add_metric([decision], getattr(plans, decision))
        yield rounds
        bounds = [*(f"{bound:.1f}" for bound in NODE_BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            PREFIX + "planner_round_draft_tokens",
            "Draft nodes let into a round, of all requests together",
            buckets=list(zip(bounds, accumulate(plans.by_nodes), strict=True)),
            sum_value=plans.admitted,
        )

    def _by_drafter(self, stats: EngineStats) -> Iterator[Metric]:
        for name, (source, text) in _BY_DRAFTER.items():
            family = CounterMetricFamily(
                PREFIX + name, f"{text} (one that two drafters proposed counts for both)", labels=["drafter"]
            )
            for drafter, counts in sorted(stats.by_drafter.items()):
                family.add_metric([drafter], counts[source])  # type: ignore[literal-required]
            yield family
        by_position = CounterMetricFamily(
            PREFIX + "drafter_num_accepted_tokens_per_pos",
            "Draft tokens accepted, of this drafter, by depth in the draft tree",
            labels=["drafter", "position"],
        )
        for drafter, counts in sorted(stats.by_drafter.items()):
            for position, count in enumerate(counts["accepted_per_pos"]):
                by_position.add_metric([drafter, str(position)], count)
        yield by_position
        failures = CounterMetricFamily(
            PREFIX + "drafter_num_failures",
            "Drafts, or parts of one, lost because this drafter failed",
            labels=["drafter"],
        )
        for drafter, count in sorted(stats.failures_by_drafter.items()):
            failures.add_metric([drafter], count)
        yield failures


class Metrics:
    """Everything that ``/metrics`` shows, in a registry of its own."""

    def __init__(self, info: Mapping[str, str]) -> None:
        """``info``: labels of ``outrider:model_info``."""
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        ProcessCollector(registry=self.registry)
        self._first = self._histogram("time_to_first_token_seconds", "Seconds from arrival to the first token")
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Seconds from one token to the next; 0 within a round", _GAPS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Seconds from arrival to the end of the answer")
        self._queue = self._histogram(
            "request_queue_time_seconds", "Seconds from arrival to a place in the batch, or to the end without one"
        )
        self._prompt = Counter(PREFIX + "prompt_tokens", "Tokens of prompts", registry=self.registry)
        self._generated = Counter(PREFIX + "generation_tokens", "Tokens of answers", registry=self.registry)
        self._success = Counter(
            PREFIX + "request_success", "Answers that ended, by reason", ["finished_reason"], registry=self.registry
        )
        Gauge(PREFIX + "model_info", "What runs here", list(info), registry=self.registry).labels(**info).set(1)
        self._last_token: dict[int, float] = {}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=buckets)

    def count_prompt(self, tokens: int) -> None:
        """A prompt was queued; one with several answers counts once, as in the answer's usage."""
        self._prompt.inc(tokens)

    def count_started(self, arrival: float, started: float) -> None:
        """A request that came at ``arrival`` got a place in the batch, for the first time. May be called by any thread.

        Both on the clock of `time.perf_counter`.
        """
        self._queue.observe(started - arrival)

    def observe(self, request_id: int, piece: Piece, arrival: float, *, started: bool) -> None:
        """One piece of an answer was delivered. started: whether its request ever got a place in the batch."""
        if piece.token_ids:
            self._generated.inc(len(piece.token_ids))
            previous = self._last_token.get(request_id)
            if previous is None:
                self._first.observe(piece.times[0] - arrival)
            for earlier, later in pairwise(piece.times if previous is None else [previous, *piece.times]):
                self._gap.observe(later - earlier)
            self._last_token[request_id] = piece.times[-1]
        if piece.last:
            self._last_token.pop(request_id, None)
            reason = piece.output.finish_reason if piece.output else "error"
            self._success.labels(finished_reason=reason).inc()
            now = time.perf_counter()
            self._whole.observe(now - arrival)
            if not started:
                self._queue.observe(now - arrival)

    def export(self, stats: EngineStats, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that the scraper accepts."""
        self.engine.stats = stats
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
