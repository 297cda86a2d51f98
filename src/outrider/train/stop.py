"""Stopping a run from outside: SIGTERM and Ctrl-C end it after the update that is under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from outrider.core.errors import OutriderError


class TrainingStoppedError(OutriderError):
    """A signal ended the run; what was learned so far is kept. number: of the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class StopRequest:
    """number: of the signal that asked for the end; None: none did."""

    number: int | None = None

    def ask(self, number: int, frame: FrameType | None) -> None:
        """A second Ctrl-C ends the program at once."""
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn both signals to a request while inside. Off the main thread, where no signals arrive, nothing is changed."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
