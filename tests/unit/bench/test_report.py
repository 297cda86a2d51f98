"""Figures on answers whose times and counts are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench import measure, report
from outrider.bench.runner import Failure, Row, Run
from outrider.core.errors import UsageError
from outrider.engine.outputs import RequestOutput, RequestTiming, SpeculationStats


def output(times: list[float], finished: float, *, tokens: list[int] | None = None, **stats: object) -> RequestOutput:
    """An answer that arrived at second 10; ``times``: when its tokens came, from then on."""
    return RequestOutput(
        request_id=0,
        prompt_token_ids=[1, 2, 3],
        token_ids=tokens if tokens is not None else list(range(len(times))),
        text="",
        finish_reason="length",
        stop_reason=None,
        seed=0,
        lossy=False,
        statistics=SpeculationStats(**stats),  # type: ignore[arg-type]
        timing=RequestTiming(10.0, [10 + time for time in times], 10 + finished),
    )


def test_rates_and_gaps() -> None:
    answer = output([1.0, 1.5, 1.5, 1.5, 2.0], finished=2.0)
    assert measure.seconds(answer) == pytest.approx(2.0)
    assert measure.tokens_per_second(answer) == pytest.approx(2.5)
    assert measure.decode_tokens_per_second(answer) == pytest.approx(4.0)
    assert measure.gaps(answer) == pytest.approx([0.5, 0, 0, 0.5])


def test_answers_too_short_to_measure_have_rate_zero() -> None:
    assert measure.tokens_per_second(output([], finished=1.0)) == 0
    assert measure.decode_tokens_per_second(output([1.0], finished=1.0)) == 0


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 2.5), (100, 4), (95, 3.85)])
def test_percentiles_interpolate(percent: float, value: float) -> None:
    assert measure.percentile([4, 1, 3, 2], percent) == pytest.approx(value)


def test_no_values_have_no_percentile() -> None:
    assert measure.percentile([], 50) is None


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [5], 0), ([], [], None)],
)
def test_first_difference(one: list[int], other: list[int], at: int | None) -> None:
    left, right = (output([], finished=1.0, tokens=tokens) for tokens in (one, other))
    assert left.first_difference(right) == at


def test_acceptance_by_position_is_a_share_of_drafting_rounds() -> None:
    stats = SpeculationStats(rounds=10, drafted_rounds=4, accepted_by_position=[3, 1])
    assert measure.acceptance_by_position(stats) == [0.75, 0.25]
    assert measure.acceptance_by_position(SpeculationStats(rounds=3)) == []


def test_every_figure_that_is_saved_has_a_definition() -> None:
    saved = set(measure.statistics_record(SpeculationStats())) | set(report.Summary.__dataclass_fields__)
    counts = {"drafted_rounds", "drafted", "accepted", "committed", "failures", "accepted_by_position"}
    counts |= {"drafted_by_source", "accepted_by_source", "category", "method", "answers", "output_tokens", "compared"}
    counts |= {"lossy", "speculation"}
    for name in saved - counts:
        base = name.rsplit("_p", 1)[0] if name.rsplit("_p", 1)[-1].isdigit() else name
        assert base in measure.DEFINITIONS, name


def row(prompt: str, category: str, method: str, answer: RequestOutput, identical: bool | None = True) -> Row:
    return Row(prompt, category, 0, method, 0, answer, identical)


def two_method_run() -> Run:
    """Four tokens an answer. Plain decoding takes 4, 8 and 10 s; the other is 2, 4 and 10 times as fast."""
    fast = {"rounds": 2, "drafted": 4, "accepted": 2, "committed": 4, "drafted_rounds": 2, "accepted_by_position": [2]}
    return Run(
        methods=["none", "ngram"],
        baseline="none",
        reference="none",
        rows=[
            row("p/1", "p", "none", output([1, 2, 3, 4], 4.0, rounds=4, committed=4)),
            row("p/1", "p", "ngram", output([0.5, 1, 1.5, 2], 2.0, **fast)),
            row("q/1", "q", "ngram", output([0.5, 1, 1.5, 2], 2.0, **fast), identical=False),
            row("q/1", "q", "none", output([2, 4, 6, 8], 8.0, rounds=4, committed=4)),
            row("q/2", "q", "none", output([1, 4, 7, 10], 10.0, rounds=4, committed=4)),
            row("q/2", "q", "ngram", output([0.1, 0.4, 0.7, 1], 1.0, **fast)),
        ],
    )


def summary(run: Run, category: str, method: str) -> report.Summary:
    (found,) = [s for s in report.summarise(run) if (s.category, s.method) == (category, method)]
    return found


def test_speed_ups_by_both_definitions() -> None:
    overall = summary(two_method_run(), report.OVERALL, "ngram")
    assert overall.speedup_median == pytest.approx(4.0)
    assert overall.speedup_totals == pytest.approx(22 / 5)
    assert overall.decode_speedup_totals == pytest.approx((3 + 6 + 9) / (1.5 + 1.5 + 0.9))
    assert summary(two_method_run(), "p", "ngram").speedup_totals == pytest.approx(2.0)
    assert summary(two_method_run(), report.OVERALL, "none").speedup_median == pytest.approx(1.0)


def test_answers_that_only_one_side_gave_do_not_enter_the_speed_up() -> None:
    run = two_method_run()
    run.rows.append(row("p/2", "p", "ngram", output([0.001], 0.001), identical=None))
    run.failures.append(Failure("p/2", "p", 0, "none", "KVCacheFullError: no room"))
    assert summary(run, report.OVERALL, "ngram").speedup_median == pytest.approx(4.0)
    assert summary(run, report.OVERALL, "ngram").speedup_totals == pytest.approx(22 / 5)
    assert summary(run, report.OVERALL, "ngram").answers == 4
    assert summary(run, report.OVERALL, "none").failures == 1


def test_without_plain_decoding_there_is_no_speed_up() -> None:
    run = two_method_run()
    run.baseline = None
    assert summary(run, report.OVERALL, "ngram").speedup_totals is None
    assert "-" in report.format_report(report.summarise(run))


def test_speculation_and_identity_add_up() -> None:
    overall = summary(two_method_run(), report.OVERALL, "ngram")
    assert overall.speculation["acceptance_rate"] == pytest.approx(0.5)
    assert overall.speculation["mean_acceptance_length"] == pytest.approx(2.0)
    assert overall.speculation["acceptance_by_position"] == [1.0]
    assert (overall.identical, overall.compared) == (2, 3)


def test_the_printed_report_has_every_category_and_method() -> None:
    text = report.format_report(report.summarise(two_method_run()))
    for word in ("p", "q", "overall", "none", "ngram", "4.40x", "2/3", "acceptance by position"):
        assert word in text


def test_results_are_saved_whole_and_can_be_read_back(tmp_path: Path) -> None:
    run = two_method_run()
    path = tmp_path / "new" / "results.json"
    report.check_output(path)
    report.save(report.to_record(run, report.summarise(run), {"configuration": {"model": "m"}}), path)
    record = json.loads(path.read_text())
    assert record["configuration"] == {"model": "m"}
    assert len(record["rows"]) == 6
    assert record["rows"][2]["itl"] == pytest.approx([0.5, 0.5, 0.5])
    assert record["definitions"]["itl"]
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        report.check_output(tmp_path / "file" / "results.json")
    with pytest.raises(UsageError, match="folder"):
        report.check_output(tmp_path)
