"""The native executor: C++ kernels for CPUs, shaped for verifying a few rows at a time, every row bit-identical."""

from __future__ import annotations

import os

from outrider.core.errors import ConfigError

ISA = "OUTRIDER_ISA"
"""Environment variable that names the instruction set whose kernels are to run."""


def why_unavailable() -> str | None:
    """What keeps the native executor from running on this machine, as one line; None if nothing does."""
    try:
        from outrider import _native
    except ImportError as error:
        return (
            f"the native extension is not there ({error}); install a C++20 compiler and the package again, "
            "or use the executor 'torch'"
        )
    try:
        _native.default_isa()
    except ValueError as error:
        return str(error)
    return None


def require() -> None:
    """Raise ConfigError unless the native executor can run."""
    reason = why_unavailable()
    if reason is not None:
        raise ConfigError(reason)


def default_threads() -> int:
    """One per processor that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
