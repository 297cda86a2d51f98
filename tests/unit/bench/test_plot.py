"""The figure of a run, drawn from what a report records."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.bench import plot, report
from outrider.core.errors import ConfigError, UsageError
from tests.unit.bench.test_report import two_method_run

CONTEXT = {
    "created": "2026-01-02T03:04:05+0000",
    "configuration": {"model": "smollm2-135m", "executor": "native"},
    "machine": {"cpu": "A Processor", "cores": 2},
    "commit": {"sha": "0123456789abcdef", "modified": True},
}


def recorded(folder: Path) -> dict[str, Any]:
    """A run whose rounds are known, through the file that a bench leaves."""
    run = two_method_run()
    for row in run.rows:
        if row.method == "ngram":
            row.output.statistics.rounds_by_draft = {(0, 0): 1, (3, 0): 2, (3, 3): 4, (8, 5): 1}
    report.save(report.to_record(run, report.summarise(run), CONTEXT), folder / "run.json")
    record: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return record


def test_rounds_are_binned_by_what_they_verified(tmp_path: Path) -> None:
    record = recorded(tmp_path)
    assert plot.rounds_by_verified(record, "ngram") == [(0, 3, 0.0), (3, 18, 2.0), (8, 3, 5.0)]
    assert plot.rounds_by_verified(record, "none") == []


@pytest.mark.parametrize("suffix", plot.FORMATS)
def test_a_recorded_report_is_drawn(tmp_path: Path, suffix: str) -> None:
    record, path = recorded(tmp_path), tmp_path / f"figure{suffix}"
    plot.check(path)
    plot.draw(record, path)
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(starts[suffix])
    assert not list(tmp_path.glob("*.part"))


def test_what_is_drawn_is_what_was_recorded(tmp_path: Path) -> None:
    """Read off the figure's own artists."""
    from matplotlib.figure import Figure

    record = recorded(tmp_path)
    left, right = Figure().subplots(1, 2)
    plot._draw_drafts(left, record, ["ngram"])
    plot._draw_speedups(right, record, ["ngram"], ["p", "q", report.OVERALL])
    assert left.collections[0].get_offsets().tolist() == [[0, 0], [3, 2], [8, 5]]
    areas = left.collections[0].get_sizes()
    assert areas[1] / areas[0] == pytest.approx(6)
    assert [bar.get_height() for bar in right.patches] == pytest.approx([2.0, 6.0, 4.4])
    assert left.get_xlabel()
    assert left.get_ylabel()
    assert right.get_ylabel()
    assert "smollm2-135m" in plot._title(record)
    assert "A Processor" in plot._title(record)


def test_a_run_without_plain_decoding_has_no_speed_up_to_draw(tmp_path: Path) -> None:
    record = recorded(tmp_path) | {"baseline": None}
    plot.draw(record, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


def test_what_cannot_be_drawn_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must end in"):
        plot.check(tmp_path / "figure.jpeg")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        plot.check(tmp_path / "file" / "figure.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[plot\]'"):
        plot.check(tmp_path / "figure.png")
