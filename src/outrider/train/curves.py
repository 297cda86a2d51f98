"""What is recorded while a drafter learns, as JSON and as a figure."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.models.cache import replacing
from outrider.train.modules.base import Tally


@dataclass
class Curves:
    """train, held_out: points in order of updates, as `point` makes them."""

    method: str
    train: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """curves.json, and curves.png where matplotlib is installed; each appears whole or not at all."""
        with replacing(folder / "curves.json") as part:
            part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        if can_draw():
            with replacing(folder / "curves.png") as part:
                self._draw(part)

    def _draw(self, part: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, 4), dpi=110)
        loss, accuracy, length = figure.subplots(1, 3)
        for points, style, name in ((self.train, "-", "trained on"), (self.held_out, "o--", "held out")):
            if not points:
                continue
            updates = [point["update"] for point in points]
            loss.plot(updates, [point["loss"] for point in points], style, label=name, markersize=4)
            length.plot(updates, [point["acceptance_length"] for point in points], style, label=name, markersize=4)
        points = self.held_out or self.train
        for position in range(max(len(point["accuracy"]) for point in points)):
            reached = [point for point in points if position < len(point["accuracy"])]
            xs, ys = [point["update"] for point in reached], [point["accuracy"][position] for point in reached]
            accuracy.plot(xs, ys, "o-", label=f"{position + 1}", markersize=4)
        loss.set_title("cross-entropy, mean over draft positions")
        accuracy.set_title("accuracy by draft position" + (", held out" if self.held_out else ""))
        length.set_title("estimated acceptance length, one chain")
        for axes in (loss, accuracy, length):
            axes.set_xlabel("updates")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        figure.suptitle(self.method)
        figure.tight_layout()
        figure.savefig(part, format="png")


def can_draw() -> bool:
    """Whether matplotlib is installed, which the extra ``plot`` brings."""
    return importlib.util.find_spec("matplotlib") is not None


def point(update: int, tally: Tally) -> dict[str, Any]:
    """One point of a curve: what was measured at, or since the last one up to, an update.

    loss: mean cross-entropy of all guesses, in nats. accuracy: by draft position, of guesses that met the target's
    likeliest token. acceptance_length: 1 + sum over positions of the product of accuracies so far, which is what a
    drafted chain of these many tokens would bring a round, the target's own token included.
    """
    asked = tally.asked > 0
    accuracy = tally.hits[asked] / tally.asked[asked]
    return {
        "update": update,
        "loss": float(tally.entropy.sum() / tally.learned.sum().clamp(min=1)),
        "accuracy": [round(value, 6) for value in accuracy.tolist()],
        "acceptance_length": round(1 + float(torch.cumprod(accuracy, 0).sum()), 6),
    }
