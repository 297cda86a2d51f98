"""Signals: what a supervisor, an operator and an out-of-memory killer do to the process."""

from __future__ import annotations

import gc
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import SamplingParams
from outrider.serve.config import ServerConfig
from outrider.serve.server import Server, serve
from tests.serve.support import endless, open_llm

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 60

pytestmark = pytest.mark.slow


class Process:
    """A server process whose rounds take ``pause`` seconds."""

    def __init__(self, *, port: int = 0, pause: float = 0.02, drain: float = 60.0) -> None:
        words = [sys.executable, "-m", "tests.serve.process", str(port), str(pause), str(drain)]
        self.process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        assert found is not None, line
        self.port = int(found[1])

    def ask(self, tokens: int = TOKENS, *, stream: bool = False) -> tuple[int, dict[str, str], list[Any]]:
        """Status, headers, and the JSON objects of the answer."""
        body = {"model": "tiny", "prompt": "The quick", "max_tokens": tokens, "temperature": 0, "stream": stream}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read().decode()
            lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")] if stream else [text]
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status if answer.status != 200 or not stream else 200, headers, [json.loads(x) for x in lines]

    def end(self) -> tuple[int, str]:
        """Exit code, and what was written to standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Process] = []

    def begin(**options: Any) -> Process:
        started.append(Process(**options))
        return started[-1]

    yield begin
    for process in started:
        process.process.kill()
        process.process.wait()


class Load:
    """Clients, half of them streaming, each in a thread."""

    def __init__(self, server: Process, clients: int, tokens: int = TOKENS) -> None:
        self.answers: list[tuple[int, list[Any]]] = []
        self.failures: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(server, tokens, bool(n % 2))) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, server: Process, tokens: int, stream: bool) -> None:
        try:
            status, _, objects = server.ask(tokens, stream=stream)
            self.answers.append((status, objects))
        except Exception as error:
            self.failures.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a client hangs"

    def texts(self) -> list[str]:
        return ["".join(part["choices"][0]["text"] for part in objects) for _, objects in self.answers]


def right(tokens: int = TOKENS) -> str:
    return open_llm(endless, "none").generate("The quick", SamplingParams(max_tokens=tokens))[0].text


def test_sigterm_finishes_what_runs_and_refuses_what_comes(start: Any) -> None:
    server = start()
    load = Load(server, 8)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    status, headers, objects = server.ask(1)
    assert (status, objects[0]["error"]["code"]) == (503, "draining")
    assert "retry-after" in headers
    load.join()
    assert load.failures == []
    assert load.texts() == [right()] * 8
    code, errors = server.end()
    assert code == 0
    assert "finishing 8 answers" in errors
    assert "Traceback" not in errors


def test_a_drain_that_takes_too_long_is_given_up(start: Any) -> None:
    server = start(pause=0.05, drain=0.5)
    load = Load(server, 6, tokens=250)
    time.sleep(0.5)
    before = time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    load.join()
    code, errors = server.end()
    assert time.perf_counter() - before < 12
    assert code == 1
    assert "giving up 6 answers" in errors
    assert load.failures == []
    for status, objects in load.answers:
        assert (status, len(objects)) == (503, 1) or status == 200
        assert objects[-1]["error"]["code"] == "draining"


def test_a_second_signal_does_not_wait(start: Any) -> None:
    server = start(pause=0.05)
    load = Load(server, 4, tokens=250)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    code, _ = server.end()
    load.join()
    assert code != 0
    assert len(load.answers) + len(load.failures) == 4


def test_an_idle_server_ends_at_once(start: Any) -> None:
    server = start()
    assert server.ask(2)[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_after_sigkill_another_takes_the_port_and_answers(start: Any) -> None:
    server = start()
    load = Load(server, 6, tokens=250)
    time.sleep(0.5)
    server.process.kill()
    load.join()
    assert load.answers == []
    assert len(load.failures) == 6
    again = start(port=server.port, pause=0)
    status, _, objects = again.ask()
    assert (status, objects[0]["choices"][0]["text"]) == (200, right())


def test_what_was_loaded_is_left_to_the_collector_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays frozen is never freed, and the extension says so of every matrix when the process ends."""
    frozen: list[int] = []
    monkeypatch.setattr(Server, "run", lambda self: frozen.append(gc.get_freeze_count()))
    before = gc.get_freeze_count()
    serve(open_llm(endless, "none"), ServerConfig())
    assert frozen[0] > before
    assert gc.get_freeze_count() == 0
