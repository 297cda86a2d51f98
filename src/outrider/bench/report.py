"""From a run to figures: per category and overall, as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench import measure
from outrider.bench.table import format_table
from outrider.core.errors import UsageError
from outrider.models.cache import replacing

if TYPE_CHECKING:
    from outrider.bench.runner import Row, Run
    from outrider.engine.outputs import RequestOutput, SpeculationStats

OVERALL = "overall"
SCHEMA = 1


@dataclass(frozen=True)
class Summary:
    """Figures of one method over one category, as `measure.DEFINITIONS` says; None where there is nothing to divide.

    answers: finished ones. identical, compared: how many of the compared ones had the reference's token ids.
    ttft_p50, ttft_p95, itl_p50, itl_p95, itl_p99: in seconds.
    """

    category: str
    method: str
    answers: int
    failures: int
    output_tokens: int
    seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float
    speedup_totals: float | None
    speedup_median: float | None
    decode_speedup_totals: float | None
    decode_speedup_median: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    compared: int
    identical: int
    lossy: bool
    speculation: dict[str, Any]


def summarise(run: Run) -> list[Summary]:
    """One summary for each category and method, categories in the order they were run, the overall figures last."""
    categories = list(dict.fromkeys([*(row.category for row in run.rows), *(f.category for f in run.failures)]))
    return [_summary(run, category, method) for category in [*categories, OVERALL] for method in run.methods]


def _summary(run: Run, category: str, method: str) -> Summary:
    def chosen(name: str | None) -> list[Row]:
        return [row for row in run.rows if row.method == name and category in (row.category, OVERALL)]

    rows = chosen(method)
    outputs = [row.output for row in rows]
    pairs = _pairs(rows, chosen(run.baseline))
    itl = [gap for output in outputs for gap in measure.gaps(output)]
    ttft = [output.timing.ttft for output in outputs]
    return Summary(
        category=category,
        method=method,
        answers=len(rows),
        failures=sum(f.method == method and category in (f.category, OVERALL) for f in run.failures),
        output_tokens=sum(len(output.token_ids) for output in outputs),
        seconds=sum(measure.seconds(output) for output in outputs),
        tokens_per_second=_total_rate(outputs),
        decode_tokens_per_second=_total_decode_rate(outputs),
        speedup_totals=_ratio_of_totals(pairs, _total_rate),
        speedup_median=_median_of_ratios(pairs, measure.tokens_per_second),
        decode_speedup_totals=_ratio_of_totals(pairs, _total_decode_rate),
        decode_speedup_median=_median_of_ratios(pairs, measure.decode_tokens_per_second),
        ttft_p50=measure.percentile(ttft, 50),
        ttft_p95=measure.percentile(ttft, 95),
        itl_p50=measure.percentile(itl, 50),
        itl_p95=measure.percentile(itl, 95),
        itl_p99=measure.percentile(itl, 99),
        compared=sum(row.identical is not None for row in rows),
        identical=sum(row.identical is True for row in rows),
        lossy=any(output.lossy for output in outputs),
        speculation=measure.statistics_record(_total(outputs)),
    )


def _total(outputs: Sequence[RequestOutput]) -> SpeculationStats:
    from outrider.engine.outputs import SpeculationStats

    return SpeculationStats.total(output.statistics for output in outputs)


def _total_rate(outputs: Sequence[RequestOutput]) -> float:
    return measure.rate(
        sum(len(output.token_ids) for output in outputs), sum(measure.seconds(output) for output in outputs)
    )


def _total_decode_rate(outputs: Sequence[RequestOutput]) -> float:
    return measure.rate(
        sum(max(len(output.token_ids) - 1, 0) for output in outputs),
        sum(output.timing.decode_seconds for output in outputs),
    )


Pair = tuple["RequestOutput", "RequestOutput"]


def _pairs(rows: Sequence[Row], plain: Sequence[Row]) -> list[Pair]:
    """(this method's answer, plain decoding's), for the turns that both answered."""
    by_turn = {(row.prompt_id, row.turn): row.output for row in plain}
    return [(row.output, by_turn[row.prompt_id, row.turn]) for row in rows if (row.prompt_id, row.turn) in by_turn]


def _ratio_of_totals(pairs: Sequence[Pair], rate: Callable[[Sequence[RequestOutput]], float]) -> float | None:
    plain = rate([pair[1] for pair in pairs])
    return rate([pair[0] for pair in pairs]) / plain if plain else None


def _median_of_ratios(pairs: Sequence[Pair], rate: Callable[[RequestOutput], float]) -> float | None:
    ratios = [rate(mine) / rate(plain) for mine, plain in pairs if rate(plain)]
    return statistics.median(ratios) if ratios else None


_SPEED_LEGEND = """\
speed: all answers together, and as the median of single answers, relative to plain decoding; decode leaves out the time
to the first token"""


def format_report(summaries: Sequence[Summary]) -> str:
    """The figures as text: one table of speed, one of speculation, one of acceptance by position."""
    sections = [
        (_SPEED_LEGEND, _speed_table(summaries)),
        ("speculation, and where the time of the rounds went", _speculation_table(summaries)),
        ("acceptance by position", _position_table(summaries)),
    ]
    return "\n\n".join(f"{title}\n\n{table}" for title, table in sections if table)


def _speed_table(summaries: Sequence[Summary]) -> str:
    header = ["category", "method", "answers", "tok/s", "speed-up", "(median)", "decode tok/s", "speed-up", "(median)"]
    header += ["TTFT p50", "ITL p50", "p95", "p99", "identical"]
    rows = [
        [
            s.category,
            s.method,
            str(s.answers) + (f" ({s.failures} failed)" if s.failures else ""),
            f"{s.tokens_per_second:.1f}",
            _times(s.speedup_totals),
            _times(s.speedup_median),
            f"{s.decode_tokens_per_second:.1f}",
            _times(s.decode_speedup_totals),
            _times(s.decode_speedup_median),
            *(_milliseconds(value) for value in (s.ttft_p50, s.itl_p50, s.itl_p95, s.itl_p99)),
            f"{s.identical}/{s.compared}" + (" lossy" if s.lossy else ""),
        ]
        for s in summaries
    ]
    return format_table(header, rows, align="ll")


_PARTS = ("draft", "verify", "accept", "engine")


def _speculation_table(summaries: Sequence[Summary]) -> str:
    header = ["category", "method", "rounds", "drafted", "acceptance rate", "mean acceptance length"]
    header += ["rounds took", *_PARTS]
    rows = []
    for s in summaries:
        counts = s.speculation
        seconds = [counts[f"{part}_seconds"] for part in _PARTS]
        total = sum(seconds)
        rows.append(
            [
                s.category,
                s.method,
                str(counts["rounds"]),
                str(counts["drafted"]),
                f"{counts['acceptance_rate']:.1%}" if counts["drafted"] else "-",
                f"{counts['mean_acceptance_length']:.2f}" if counts["rounds"] else "-",
                f"{total:.1f} s",
                *(f"{part / total:.0%}" if total else "-" for part in seconds),
            ]
        )
    return format_table(header, rows, align="ll")


_POSITIONS_SHOWN = 8


def _position_table(summaries: Sequence[Summary]) -> str:
    rows = []
    for s in summaries:
        shares = s.speculation["acceptance_by_position"][:_POSITIONS_SHOWN]
        if shares:
            rows.append([s.category, s.method, *(f"{share:.0%}" for share in shares)])
    if not rows:
        return ""
    width = max(len(row) for row in rows)
    header = ["category", "method", *(str(depth) for depth in range(1, width - 1))]
    return format_table(header, [row + [""] * (width - len(row)) for row in rows], align="ll")


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.0f} ms"


def to_record(run: Run, summaries: Sequence[Summary], context: Mapping[str, Any]) -> dict[str, Any]:
    """The whole run as plain values. ``context``: configuration, versions and machine, from the caller."""
    return {
        "schema": SCHEMA,
        **context,
        "definitions": measure.DEFINITIONS,
        "baseline": run.baseline,
        "reference": run.reference,
        "interrupted": run.interrupted,
        "summary": [asdict(summary) for summary in summaries],
        "rows": [_row_record(row) for row in run.rows],
        "failures": [asdict(failure) for failure in run.failures],
    }


def _row_record(row: Row) -> dict[str, Any]:
    output = row.output
    return {
        "prompt_id": row.prompt_id,
        "category": row.category,
        "turn": row.turn,
        "method": row.method,
        "order": row.order,
        "prompt_tokens": len(output.prompt_token_ids),
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "lossy": output.lossy,
        "identical": row.identical,
        "first_difference": row.first_difference,
        "seconds": measure.seconds(output),
        "ttft": output.timing.ttft,
        "decode_seconds": output.timing.decode_seconds,
        "tokens_per_second": measure.tokens_per_second(output),
        "decode_tokens_per_second": measure.decode_tokens_per_second(output),
        "itl": [round(gap, 6) for gap in measure.gaps(output)],
        "speculation": measure.statistics_record(output.statistics),
    }


def save(record: Mapping[str, Any], path: Path) -> None:
    """Write the record as JSON; the file appears whole or not at all."""
    with replacing(path) as part:
        part.write_text(_as_json(record), encoding="utf-8")


def _as_json(record: Mapping[str, Any]) -> str:
    """One line for each entry, and one for each element of a list of objects: readable, and kind to diff and grep."""
    entries = []
    for key, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join("  " + json.dumps(item, allow_nan=False) for item in value) + "\n ]"
        else:
            text = json.dumps(value, allow_nan=False)
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def check_output(path: Path) -> None:
    """Raise UsageError if a file could not be written to ``path``: better before a long run than after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror}; choose another place") from None
    if path.is_dir():
        raise UsageError(f"cannot write to {path}: it is a folder; choose another place")
