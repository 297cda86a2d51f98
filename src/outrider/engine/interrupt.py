"""Ctrl-C between rounds, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back while the block runs, then raise KeyboardInterrupt; a second one is not held back.

    A round that is cut in the middle could leave KV cache and text at odds, and the executor is used again afterwards.
    Outside the main thread, where Python delivers no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is None or previous is signal.SIG_IGN:
        yield
        return
    pending = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt
