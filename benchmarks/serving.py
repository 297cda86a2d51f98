"""Measure the HTTP server: throughput and latency under load, what HTTP costs, long prompts, shared prefixes.

    python benchmarks/serving.py --model smollm2-135m
    python benchmarks/serving.py --url http://127.0.0.1:8000 --parts load,interference

Without --url it starts ``outrider serve`` itself, with what follows ``--`` as further options. Methods of speculation
are interleaved, block by block, through the ``speculative`` field of each request; ``default`` sends none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from http_load import Answer, Client, closed_loop, in_background

from outrider.bench.machine import commit, describe_machine, versions
from outrider.bench.measure import percentile
from outrider.bench.prompts import OWN_PROMPTS, load_prompts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG_PROMPT = 4000
SHARED_PREFIX = 1500
RUNNING = 4


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """The address of a server: the one that was named, or one that is started, and ended again."""
    if args.url:
        yield args.url
        return
    command = [sys.executable, "-m", "outrider", "serve", args.model, "--port", "0", *args.options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://\S+:\d+", line):
                break
            sys.stderr.write(line)
        else:
            raise SystemExit("the server did not start")
        # Nobody else reads what it says later on, and a full pipe would stop it.
        threading.Thread(target=lambda: sys.stderr.writelines(process.stderr or ()), daemon=True).start()
        yield found[0]
    finally:
        process.terminate()
        process.wait(timeout=60)


class Measure:
    """What all parts need: address, model, methods, and prompts."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.url, self.args = url, args
        self.methods = args.methods.split(",")
        every = load_prompts(args.prompts)
        self.prompts = [p.turns[0] for p in every[:: max(1, len(every) // args.limit)][: args.limit]]
        self.random = random.Random(args.seed)

    def chat(self, prompt: str, method: str, salt: str | None = None) -> dict[str, Any]:
        """The body of a request. Requests of different ``salt`` share neither prefix cache nor drafters' memory."""
        body = {
            "model": self.args.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.args.max_tokens,
            "temperature": 0,
        }
        body |= {"cache_salt": salt} if salt is not None else {}
        return body if method == "default" else {**body, "speculative": {"method": method}}

    def words(self, number: int) -> str:
        """A text that no other request begins with, of about ``number`` tokens."""
        common = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
        return " ".join(self.random.choices(common, k=number))

    def run(self, bodies: list[dict[str, Any]], clients: int, path: str = CHAT) -> list[Answer]:
        """Answers of a closed loop; an error ends the measurement, since a figure over the rest would flatter."""
        answers = closed_loop(self.url, path, bodies, clients, self.args.api_key)
        for answer in answers:
            if answer.error:
                raise SystemExit(f"a request failed: {answer.error}")
        return answers

    # -- the parts -----------------------------------------------------------------------------------------------------

    def load(self) -> list[dict[str, Any]]:
        """Every method at every concurrency, in turn within each repeat.

        Each pass over the prompts is a tenant of its own: a prompt that comes again must not find its last answer.
        """
        rows = []
        for clients in map(int, self.args.concurrency.split(",")):
            found: dict[str, list[tuple[float, list[Answer]]]] = {method: [] for method in self.methods}
            for repeat in range(self.args.repeats):
                order = self.methods if repeat % 2 == 0 else self.methods[::-1]
                for method in order:
                    salt = f"{clients}/{repeat}/{method}"
                    bodies = [self.chat(prompt, method, salt) for prompt in self.prompts]
                    began = time.perf_counter()
                    answers = self.run(bodies, clients)
                    found[method].append((time.perf_counter() - began, answers))
            rows += [self._load_row(method, clients, runs) for method, runs in found.items()]
        for row in rows:
            base = [r for r in rows if r["method"] == "none" and r["concurrency"] == row["concurrency"]]
            row["over_none"] = row["tokens_per_second"] / base[0]["tokens_per_second"] if base else None
        return rows

    def _load_row(self, method: str, clients: int, runs: list[tuple[float, list[Answer]]]) -> dict[str, Any]:
        answers = [answer for _, part in runs for answer in part]
        gaps = [gap for answer in answers for gap in answer.gaps]
        first = [answer.ttft for answer in answers]
        return {
            "method": method,
            "concurrency": clients,
            "requests": len(answers),
            "tokens_per_second": statistics.median(sum(a.tokens for a in part) / seconds for seconds, part in runs),
            "ttft_p50": percentile(first, 50),
            "ttft_p99": percentile(first, 99),
            "chunk_gap_p50": percentile(gaps, 50),
            "chunk_gap_p99": percentile(gaps, 99),
        }

    def overhead(self) -> dict[str, Any]:
        """Seconds a token, server over offline API, one request at a time, in turn."""
        from outrider import LLM, SamplingParams

        llm = LLM(self.args.model, None if self.methods[0] == "default" else self.methods[0])
        params = SamplingParams(max_tokens=self.args.max_tokens)
        totals = {"server": [0.0, 0], "offline": [0.0, 0]}
        ratios = []
        for number, prompt in enumerate(self.prompts * self.args.repeats):
            measured: dict[str, float] = {}
            for side in ("server", "offline")[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                if side == "server":
                    tokens = self.run([self.chat(prompt, self.methods[0])], 1)[0].tokens
                else:
                    tokens = len(llm.chat([{"role": "user", "content": prompt}], params)[0].token_ids)
                seconds = time.perf_counter() - began
                measured[side] = seconds / tokens
                totals[side][0] += seconds
                totals[side][1] += tokens
            ratios.append(measured["server"] / measured["offline"])
        each = {side: seconds / tokens for side, (seconds, tokens) in totals.items()}
        return {
            "seconds_per_token": each,
            "overhead_of_totals": each["server"] / each["offline"] - 1,
            "overhead_median": statistics.median(ratios) - 1,
        }

    def interference(self) -> dict[str, Any]:
        """Gaps between the chunks of running requests, with and without a long prompt that arrives meanwhile."""
        gaps: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(self.args.repeats):
            for kind in gaps:
                found: list[Answer] = []

                def keep_running(stop: threading.Event, found: list[Answer] = found) -> None:
                    client = Client(self.url, self.args.api_key)
                    while not stop.is_set():
                        body = self.chat(self.random.choice(self.prompts), self.methods[0])
                        found.append(client.stream(CHAT, {**body, "ignore_eos": True, "max_tokens": 256}))
                    client.close()

                with in_background(keep_running, RUNNING):
                    time.sleep(self.args.settle)
                    began = time.perf_counter()
                    if kind == "with":
                        long = {"prompt": self.words(LONG_PROMPT), "max_tokens": 1, "model": self.args.model}
                        self.run([long], 1, COMPLETIONS)
                    else:
                        time.sleep(self.args.settle)
                    ended = time.perf_counter()
                for answer in found:
                    if answer.error:
                        raise SystemExit(f"a request failed: {answer.error}")
                    pairs = zip(answer.chunk_times, answer.chunk_times[1:], strict=False)
                    gaps[kind] += [later - earlier for earlier, later in pairs if began <= later and earlier <= ended]
        p99 = {kind: percentile(values, 99) for kind, values in gaps.items()}
        return {
            "chunk_gap_p99": p99,
            "chunk_gap_p50": {kind: percentile(values, 50) for kind, values in gaps.items()},
            "gaps": {kind: len(values) for kind, values in gaps.items()},
            "ratio_p99": (p99["with"] or 0) / (p99["without"] or 1),
        }

    def prefix(self) -> dict[str, Any]:
        """Time to first token of a second request over that of the first, both with one long prefix."""
        first, second = [], []
        for _ in range(self.args.repeats * 3):
            shared = self.words(SHARED_PREFIX)
            for found, end in ((first, "What comes first?"), (second, "And what comes then?")):
                body = {"model": self.args.model, "prompt": f"{shared}\n{end}", "max_tokens": 4, "temperature": 0}
                found.append(self.run([body], 1, COMPLETIONS)[0].ttft)
        return {
            "ttft_first": statistics.median(first),
            "ttft_second": statistics.median(second),
            "ratio": statistics.median(b / a for a, b in zip(first, second, strict=True)),
        }


PARTS = ("load", "overhead", "interference", "prefix")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--api-key", help="its key")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--methods", default="auto,none", help="the first one is used where only one is")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS, help="JSONL file (default: the package's own)")
    parser.add_argument("--limit", type=int, default=16, help="prompts, spread evenly over the file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--settle", type=float, default=5.0, help="seconds of running requests before, and without, one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for all of it")
    parser.add_argument("options", nargs="*", help="further options of the server that is started, after --")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {unknown.pop()!r}; known: {', '.join(PARTS)}")
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("api_key", "output")}
    record: dict[str, Any] = {"settings": settings, "machine": describe_machine(), "versions": versions()}
    record |= {"commit": commit(), "results": {}}
    with server(args) as url:
        measure = Measure(url, args)
        measure.run([measure.chat(measure.prompts[0], method) for method in measure.methods], 1)  # warm
        for part in parts:
            record["results"][part] = getattr(measure, part)()
            print(json.dumps({part: record["results"][part]}, indent=1), flush=True)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
