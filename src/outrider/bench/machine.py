"""What a measurement ran on: processor, memory bandwidth, versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_READ_BYTES = 256 << 20
"""More than the last-level cache of most machines holds, so that the reads come from memory."""


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory and operating system."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": platform.platform(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def cpu_model() -> str:
    """The processor's name, as the kernel tells it where it does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes per second at which PyTorch's threads read memory: the best of a few sums over 256 MiB.

    Decoding one token reads every weight once, so this bounds it. Measured before and after a run: a large difference
    means that something else was using the machine.
    """
    import torch

    values = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - start)
    return _READ_BYTES / best


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for name in ("outrider", "torch", "numpy", "tokenizers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def commit() -> dict[str, Any] | None:
    """Commit of the working tree that this package runs from, and whether it has changes; None outside of one."""
    package = Path(__file__).resolve().parents[1]
    root = _git(package, "rev-parse", "--show-toplevel")
    # A package installed in an environment inside some other project would otherwise report that project's commit.
    if root is None or Path(root, "src", "outrider").resolve() != package:
        return None
    sha = _git(package, "rev-parse", "HEAD")
    return None if sha is None else {"sha": sha, "modified": bool(_git(package, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
