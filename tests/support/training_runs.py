"""A program that trains small drafters, and ends in their midst where it is told to.

Each run is a process of its own, a copy of this one: what takes seconds is imported once. A line of input is a list in
JSON, [method, folder] or [method, folder, where, count, signal], and is answered with the exit status. The run sends
itself the signal when it comes to one of PLACES for the count-th time. There is a checkpoint after every fifth update.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure  # noqa: F401
import torch

from outrider.train import loop
from outrider.train.optimizer import Optimizers
from tests.support.drafting import CONFIG, ORIGIN, MemoryStore, small_module, small_target


def _signal_at(count: int, number: int, action: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
    """``action``, but the ``count``-th call comes after the signal, or before it."""
    calls = 0

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            os.kill(os.getpid(), number)
        result = action(*args, **more)
        if calls == count and after:
            os.kill(os.getpid(), number)
        return result

    return counted


_CONFIG = replace(CONFIG, checkpoint_minutes=5.0)

PLACES: Mapping[str, tuple[Any, str, bool]] = {
    "look": (MemoryStore, "read_many", False),
    "update": (Optimizers, "step", False),
    "checkpoint": (os, "fsync", False),
    "drafter": (loop, "save_head", True),
}
"""Amid looking at the data before the first update; with gradients, but before they are followed; amid writing a
checkpoint; and with the drafter written, but no last checkpoint: what is called there, and whether it is done by then.
"""


def _count_minutes() -> None:
    """Put in place of the clock one that goes on by a minute with each update."""
    minutes = 0
    due = loop._Run.save_if_due

    def counted(run: loop._Run) -> None:
        nonlocal minutes
        minutes += 1
        due(run)

    loop._Run.save_if_due = counted  # type: ignore[method-assign]
    loop.time = SimpleNamespace(monotonic=lambda: 60.0 * minutes)  # type: ignore[assignment]


def _run(store: MemoryStore, method: str, folder: str, where: str = "", count: int = 0, number: str = "") -> None:
    _count_minutes()
    if where:
        place, name, after = PLACES[where]
        setattr(place, name, _signal_at(count, signal.Signals[number], getattr(place, name), after=after))
    loop.train(store, small_module(method, store), _CONFIG, Path(folder), origin=ORIGIN, show_progress=False)


def main() -> None:
    torch.set_num_threads(1)  # no thread of PyTorch's that a copy of the process would lack
    store = MemoryStore(small_target(), 40)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                _run(store, *json.loads(line))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
