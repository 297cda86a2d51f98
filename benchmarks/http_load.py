"""Clients of an OpenAI-compatible server, made cheap: they share the machine with what they measure."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """One streamed answer. Times are those of `time.perf_counter`, taken as the chunks arrive.

    chunk_times: chunks that held text. Several tokens of one round come in one chunk, so that the gaps between chunks
    are never shorter than inter-token latencies. text: of the first choice. error: the server's, or the connection's.
    """

    sent: float
    chunk_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


class Client:
    """One connection, kept open from one request to the next."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout)
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def stream(self, path: str, body: dict[str, Any], *, leave_after: int | None = None) -> Answer:
        """Send a request and read its stream to the end, or only until ``leave_after`` chunks have come."""
        answer = Answer(time.perf_counter())
        try:
            data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
            self._connection.request("POST", path, data, self._headers)
            response = self._connection.getresponse()
            if response.status != 200:
                answer.error = f"{response.status}: {response.read().decode(errors='replace')}"
            else:
                self._read(response, answer, leave_after)
        except (OSError, http.client.HTTPException) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if answer.error is not None or leave_after is not None:
            self.close()
        answer.ended = time.perf_counter()
        return answer

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()

    def _read(self, response: http.client.HTTPResponse, answer: Answer, leave_after: int | None) -> None:
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = str(chunk["error"]["message"])
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk.get("choices", ()):
                text = choice["text"] if "text" in choice else choice["delta"].get("content")
                if text:
                    answer.chunk_times.append(now)
                    answer.text += text
            if leave_after is not None and len(answer.chunk_times) >= leave_after:
                return


def closed_loop(url: str, path: str, bodies: Sequence[dict[str, Any]], clients: int, key: str | None) -> list[Answer]:
    """Send every body, ``clients`` at a time: who has an answer sends the next. Answers in the order of the bodies."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(bodies)):
        waiting.put(number)
    answers: dict[int, Answer] = {}

    def run() -> None:
        client = Client(url, key)
        with contextlib.suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                answers[number] = client.stream(path, bodies[number])
        client.close()

    join([threading.Thread(target=run) for _ in range(clients)])
    return [answers[number] for number in range(len(bodies))]


def join(threads: Sequence[threading.Thread]) -> None:
    """Start threads and wait for all of them."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def in_background(run: Callable[[threading.Event], None], number: int) -> Iterator[None]:
    """``number`` threads that ``run`` until their event is set, which it is when the block is left."""
    stop = threading.Event()
    threads = [threading.Thread(target=run, args=(stop,)) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def metric(url: str, name: str) -> float:
    """One sample of /metrics, summed over its labels."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
