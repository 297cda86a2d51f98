"""Keep a running server busy for a while, and see that it loses no request and does not grow.

    python benchmarks/soak.py --model smollm2-135m --minutes 5
    python benchmarks/soak.py --model smollm2-135m --url http://127.0.0.1:8000

Without --url it starts ``outrider serve`` itself, with what follows ``--`` as further options. Clients send requests of
every kind: short and long, streamed to the end or left in the middle, greedy and sampled, with and without a grammar,
each drafted for in its own way, of more tenants than drafters remember. The text must be that of the same request
without speculation. Memory is read from the server's own metrics. Exit code 1 if a request was lost, a text changed,
memory grew, or the server did not come to rest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from http_load import Client, join, metric
from serving import server

METHODS = (None, "none", "ngram", "suffix", "recycle", "lookahead", "suffix+recycle")
TENANTS = 48
RESIDENT = "process_resident_memory_bytes"


@dataclass
class Report:
    """What came of it. lost: errors by text. memory: (seconds, resident bytes of the server), in order."""

    answered: int = 0
    left: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)
    at_rest: bool = False

    @property
    def growth(self) -> float:
        """Mean memory of the last quarter over that of the second one, less one; the first one fills caches."""
        values = [value for _, value in self.memory]
        quarter = len(values) // 4
        if not quarter:
            return 0.0
        return (sum(values[-quarter:]) / sum(values[quarter : 2 * quarter])) - 1

    def problems(self, most_growth: float) -> list[str]:
        """What was not as it should be, in words."""
        found = [f"{number} x {error}" for error, number in self.lost.items()]
        if self.changed:
            found.append(f"{self.changed} answers differ from those without speculation")
        if self.growth > most_growth:
            found.append(f"memory grew by {self.growth:.1%}")
        if not self.at_rest:
            found.append("requests were still running long after the last client had left")
        return found


class Soak:
    """``clients`` threads that send requests for ``seconds``."""

    def __init__(self, url: str, model: str, *, clients: int, seconds: float, key: str | None, seed: int = 0) -> None:
        self.url, self.model, self.key = url, model, key
        self._clients, self._seconds, self._seed = clients, seconds, seed
        self._plain: dict[str, str] = {}
        self._lock = threading.Lock()
        self.report = Report()

    def run(self) -> Report:
        """Run to the end."""
        began = time.perf_counter()
        self._end = began + self._seconds
        join(
            [
                threading.Thread(target=self._watch_memory, args=(began,)),
                *(threading.Thread(target=self._client, args=(number,)) for number in range(self._clients)),
            ]
        )
        self.report.at_rest = self._comes_to_rest()
        return self.report

    def _body(self, rng: random.Random) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": rng.choice(["Once upon a time", "def quicksort(items):", "The quick brown fox"])
            + " and so on" * rng.choice([0, 2, 15]),
            "max_tokens": rng.choice([1, 8, 32, 64]),
        }
        if rng.random() < 0.2:
            body |= {"regex": "([A-Z][a-z]{1,9} ){2,20}end"}
        if rng.random() < 0.5:
            return {**body, "temperature": 0}
        return {**body, "temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(5), "stop": ["\n\n"]}

    def _client(self, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        client = Client(self.url, self.key)
        while time.perf_counter() < self._end:
            body = self._body(rng)
            leaves = rng.random() < 0.15
            method = rng.choice(METHODS)
            how = {"cache_salt": f"tenant {rng.randrange(TENANTS)}"} | (
                {"speculative": {"method": method}} if method else {}
            )
            answer = client.stream("/v1/completions", body | how, leave_after=rng.randrange(1, 4) if leaves else None)
            plain = None if leaves or answer.error else self._plain_text(client, body)
            with self._lock:
                if answer.error:
                    self.report.lost[answer.error] += 1
                elif leaves:
                    self.report.left += 1
                else:
                    self.report.answered += 1
                    self.report.changed += plain is not None and answer.text != plain
        client.close()

    def _plain_text(self, client: Client, body: dict[str, Any]) -> str | None:
        """What the request gives without speculation: asked for once, whoever comes first. None if that was lost."""
        name = json.dumps(body, sort_keys=True)
        if name not in self._plain:
            answer = client.stream("/v1/completions", {**body, "speculative": {"method": "none"}})
            if answer.error:
                with self._lock:
                    self.report.lost[answer.error] += 1
                return None
            self._plain.setdefault(name, answer.text)
        return self._plain[name]

    def _watch_memory(self, began: float) -> None:
        pause = max(self._seconds / 60, 0.1)
        while time.perf_counter() < self._end:
            self.report.memory.append((time.perf_counter() - began, metric(self.url, RESIDENT)))
            time.sleep(pause)

    def _comes_to_rest(self) -> bool:
        for _ in range(100):
            if not metric(self.url, "outrider:num_requests_running") + metric(
                self.url, "outrider:num_requests_waiting"
            ):
                return True
            time.sleep(0.1)
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--api-key")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--growth", type=float, default=0.03, help="share by which memory may grow")
    parser.add_argument("options", nargs="*", help="further options of the server that is started, after --")
    args = parser.parse_args()
    with server(args) as url:
        report = Soak(url, args.model, clients=args.clients, seconds=args.minutes * 60, key=args.api_key).run()
    print(f"{report.answered} answered, {report.left} left in the middle, {sum(report.lost.values())} lost")
    print(f"memory {report.memory[0][1] / 2**20:.0f} -> {report.memory[-1][1] / 2**20:.0f} MiB ({report.growth:+.1%})")
    problems = report.problems(args.growth)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
