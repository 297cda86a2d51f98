from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.bench import machine


def test_the_machine_is_described() -> None:
    found = machine.describe_machine()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert machine.versions()["torch"]


def test_bandwidth_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    assert machine.read_bandwidth(repeats=2) > 0


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_this_package_and_of_no_project_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init")
    source = tmp_path / "src" / "outrider" / "bench" / "machine.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    monkeypatch.setattr(machine, "__file__", str(source))
    found = machine.commit()
    assert found is not None
    assert len(found["sha"]) == 40
    assert found["modified"] is False
    source.write_text("changed")
    assert machine.commit() == {**found, "modified": True}

    installed = tmp_path / "env" / "outrider" / "bench" / "machine.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.setattr(machine, "__file__", str(installed))
    assert machine.commit() is None
