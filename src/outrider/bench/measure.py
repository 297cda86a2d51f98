"""Figures of finished requests. Every figure has one definition, kept in `DEFINITIONS` and saved with each report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.outputs import RequestOutput, SpeculationStats

DEFINITIONS = {
    "seconds": "from a request's arrival to its end, prefill included",
    "tokens_per_second": "output tokens / seconds",
    "decode_tokens_per_second": "output tokens after the first / seconds from the first token to the last",
    "ttft": "seconds from arrival to the first output token",
    "itl": "seconds between one output token and the next. The tokens of a round come out together: a round of n "
    "tokens gives one gap as long as the round and n-1 gaps of zero",
    "speedup_totals": "all output tokens over all seconds, divided by the same of 'none', over the answers both gave",
    "speedup_median": "median over answers of tokens_per_second divided by that of 'none' for the same answer",
    "decode_speedup_totals": "speedup_totals, of decode_tokens_per_second",
    "decode_speedup_median": "speedup_median, of decode_tokens_per_second",
    "rounds": "forward passes of the target that emitted tokens, the one that ends the prefill included",
    "acceptance_rate": "accepted draft tokens / verified draft tokens",
    "mean_acceptance_length": "committed tokens / rounds, counting only tokens that the request emitted",
    "acceptance_by_position": "for depth 1, 2, …: rounds whose accepted path reached that depth / rounds that "
    "verified a draft",
    "rounds_by_draft": "[draft tokens verified, of them accepted, rounds in which it came to that], for each pair "
    "that came up; plain rounds are [0, 0, …]",
    "draft_seconds": "time in the drafter, learning from committed tokens included",
    "verify_seconds": "time in the target's forward passes, prefill included",
    "accept_seconds": "time in acceptance and sampling",
    "engine_seconds": "the rest of the rounds",
    "identical": "answers whose token ids equal those of the reference, which is 'none' if it was run, else the first "
    "method",
}


def tokens_per_second(output: RequestOutput) -> float:
    """Output tokens over the time from arrival to the end; 0 for an answer without tokens."""
    return rate(len(output.token_ids), seconds(output))


def decode_tokens_per_second(output: RequestOutput) -> float:
    """Tokens after the first over the time they took; 0 for an answer of fewer than two tokens."""
    return rate(len(output.token_ids) - 1, output.timing.decode_seconds)


def seconds(output: RequestOutput) -> float:
    return output.timing.finished - output.timing.arrival


def rate(tokens: int, duration: float) -> float:
    return tokens / duration if tokens > 0 and duration > 0 else 0.0


def gaps(output: RequestOutput) -> list[float]:
    """Inter-token latencies in seconds: one fewer than there are tokens."""
    return [later - earlier for earlier, later in pairwise(output.timing.token_times)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile with linear interpolation between the two nearest values; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def acceptance_by_position(stats: SpeculationStats) -> list[float]:
    """For each depth, the share of drafting rounds whose accepted path reached it."""
    if not stats.drafted_rounds:
        return []
    return [count / stats.drafted_rounds for count in stats.accepted_by_position]


def statistics_record(stats: SpeculationStats) -> dict[str, Any]:
    """Counts, times and ratios of speculation as plain values, for JSON."""
    return {
        "rounds": stats.rounds,
        "drafted_rounds": stats.drafted_rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "committed": stats.committed,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_by_position": acceptance_by_position(stats),
        "accepted_by_position": list(stats.accepted_by_position),
        "rounds_by_draft": [[*outcome, rounds] for outcome, rounds in sorted(stats.rounds_by_draft.items())],
        "drafted_by_source": dict(stats.drafted_by_source),
        "accepted_by_source": dict(stats.accepted_by_source),
        "failures": stats.failures,
        "draft_seconds": stats.draft_seconds,
        "verify_seconds": stats.verify_seconds,
        "accept_seconds": stats.accept_seconds,
        "engine_seconds": stats.engine_seconds,
    }
