"""One figure of the planner's choices, drawn from the record of a run.

Left: how many draft tokens a round verified, and how many of them were accepted. Right: what that made of the clock.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.report import OVERALL, check_output
from outrider.core.errors import ConfigError
from outrider.models.cache import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette ("Color Universal Design", 2008): told apart whatever the reader's colour vision."""
_MARKERS = "osD^vPX"
_LARGEST = 400
"""Area of the largest marker, in square points."""


def check(path: Path) -> None:
    """Raise UsageError if no figure could be drawn to ``path``: better before a long run than after it."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot={path} must end in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'outrider[plot]'")
    check_output(path)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw a run to ``path``, which appears whole or not at all.

    record: what `report.to_record` returns, or the same read back from a file.
    """
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(entry["method"] for entry in record["summary"]))
    drafting = [method for method in methods if method != record["baseline"]]
    categories = list(dict.fromkeys(entry["category"] for entry in record["summary"]))
    widths = (6.0, max(6.0, 0.2 * len(categories) * (len(drafting) + 1)))  # inches; on the right, 0.2 a bar
    figure = Figure(figsize=(sum(widths), 5.5), dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=widths)
    _draw_drafts(left, record, drafting)
    _draw_speedups(right, record, drafting, categories)
    figure.suptitle(_title(record), fontsize=10)
    figure.tight_layout()
    with replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:].lower())


def rounds_by_verified(record: Mapping[str, Any], method: str) -> list[tuple[int, int, float]]:
    """(draft tokens verified, rounds that verified so many, mean accepted in them) of a method, over the whole run."""
    rounds: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for entry in record["summary"]:
        if entry["method"] == method and entry["category"] == OVERALL:
            for nodes, kept, count in entry["speculation"]["rounds_by_draft"]:
                rounds[nodes] += count
                accepted[nodes] += kept * count
    return [(nodes, rounds[nodes], accepted[nodes] / rounds[nodes]) for nodes in sorted(rounds)]


def _draw_drafts(axes: Axes, record: Mapping[str, Any], methods: Sequence[str]) -> None:
    from matplotlib.collections import PathCollection

    points = {method: rounds_by_verified(record, method) for method in methods}
    most = max((rounds for found in points.values() for _, rounds, _ in found), default=1)
    widest = max((nodes for found in points.values() for nodes, _, _ in found), default=1)
    axes.plot([0, widest], [0, widest], color="0.6", linestyle="--", linewidth=1, label="all accepted")
    for number, (method, found) in enumerate(points.items()):
        axes.scatter(
            [nodes for nodes, _, _ in found],
            [mean for _, _, mean in found],
            [max(8.0, _LARGEST * rounds / most) for _, rounds, _ in found],
            color=_colour(number),
            marker=_MARKERS[number % len(_MARKERS)],
            alpha=0.6,
            edgecolors="black",
            linewidths=0.4,
            label=method,
        )
    axes.set_ylim(-0.3, max((mean for found in points.values() for _, _, mean in found), default=1.0) * 1.1 + 0.5)
    axes.set_xlabel("draft tokens verified in a round (0: plain round)")
    axes.set_ylabel("draft tokens accepted, mean per round")
    axes.set_title(f"Draft budget against acceptance\narea: rounds, the largest {most}", fontsize=10)
    # The markers of the legend would otherwise be as large as the largest in the plot.
    for handle in axes.legend(fontsize=8).legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([40])


def _draw_speedups(axes: Axes, record: Mapping[str, Any], methods: Sequence[str], categories: Sequence[str]) -> None:
    axes.set_title("Speed-up by category\nall answers of a category together, prefill included", fontsize=10)
    if record["baseline"] is None:
        axes.text(0.5, 0.5, "no plain decoding in this run", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    speedup = {(entry["category"], entry["method"]): entry["speedup_totals"] for entry in record["summary"]}
    width = 0.8 / max(1, len(methods))
    for number, method in enumerate(methods):
        places = [at - 0.4 + (number + 0.5) * width for at in range(len(categories))]
        heights = [speedup.get((category, method)) or 0.0 for category in categories]
        axes.bar(places, heights, width, color=_colour(number), edgecolor="black", linewidth=0.4, label=method)
    axes.axhline(1.0, color="0.3", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(categories)), categories, rotation=35, ha="right", fontsize=8)
    axes.set_xlabel("category")
    axes.set_ylabel(f"tokens/s over those of {record['baseline']!r}")
    if methods:
        axes.legend(fontsize=8)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _title(record: Mapping[str, Any]) -> str:
    configuration, machine = record["configuration"], record["machine"]
    commit = record.get("commit")
    parts = [
        f"{configuration['model']}, {configuration['executor']} executor",
        f"{machine['cpu']}, {machine['cores']} cores",
        record["created"][:10],
        f"commit {commit['sha'][:10]}{' with changes' if commit['modified'] else ''}" if commit else "",
    ]
    return " | ".join(part for part in parts if part)
