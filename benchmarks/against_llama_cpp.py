"""Outrider's native executor next to llama.cpp: the same GGUF file, the same machine, every measurement interleaved.

    python benchmarks/against_llama_cpp.py qwen2.5-coder-1.5b --parts forward,prompt,decode,auto --prompts prompts.jsonl

Needs llama-cpp-python, built for this machine. forward: one pass over 1 … 32 rows at a context of 200. prompt: reading
a prompt of 512 tokens. decode: plain decoding. auto: speculation over a prompts file, against llama.cpp's plain
decoding and against our own. Each figure is a median; each ratio the median of ratios of neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider import LLM, RequestOutput, SamplingParams
from outrider.bench.machine import describe_machine, read_bandwidth
from outrider.bench.prompts import OWN_PROMPTS, load_prompts, select
from outrider.executors.base import Segment

ROWS = (1, 2, 4, 8, 16, 32)


class Llama:
    """llama-cpp-python, reduced to what is timed. Greedy; the argmax is taken from its own logits."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        from llama_cpp import Llama as Binding

        self._llama = Binding(
            path, n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
        )

    def start(self, tokens: Sequence[int]) -> float:
        """Forget everything and read a prompt. Returns seconds."""
        self._llama.reset()
        return self.rows(tokens)

    def rows(self, tokens: Sequence[int]) -> float:
        """One pass over some rows. Returns seconds."""
        start = time.perf_counter()
        self._llama.eval(list(tokens))
        return time.perf_counter() - start

    def back(self, count: int) -> None:
        """Forget the last ``count`` rows."""
        self._llama.n_tokens -= count
        self._llama._ctx.kv_cache_seq_rm(0, self._llama.n_tokens, -1)

    def decode(self, prompt: Sequence[int], count: int, ends: Sequence[int]) -> tuple[int, float]:
        """Plain greedy decoding. Returns (tokens after the first one, their seconds)."""
        self.start(prompt)
        made = 0
        start = time.perf_counter()
        while made < count:
            token = int(self._llama.scores[self._llama.n_tokens - 1].argmax())
            made += 1
            if token in ends or made == count:
                break
            self._llama.eval([token])
        return made - 1, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="an alias or a GGUF file")
    parser.add_argument("--parts", default="forward,prompt,decode")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--categories", default="")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--method", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    llm = LLM(args.model, "none", executor="native", threads=args.threads)
    assert llm.model.source is not None
    llama = Llama(str(llm.model.source), 4096, args.threads)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, {llm.executor.isa}; load {machine['load_average']}")  # type: ignore[attr-defined]
    parts: dict[str, Callable[[LLM, Llama, argparse.Namespace], Any]] = {
        "forward": forward,
        "prompt": prompt_speed,
        "decode": decode,
        "auto": auto,
    }
    results: dict[str, Any] = {"model": args.model, "machine": machine, "bandwidth": [read_bandwidth()]}
    for part in args.parts.split(","):
        results[part] = parts[part](llm, llama, args)
        results["bandwidth"].append(read_bandwidth())
    print("read bandwidth before and after each part, GB/s:", [round(b / 1e9, 1) for b in results["bandwidth"]])
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))


def forward(llm: LLM, llama: Llama, args: argparse.Namespace, context: int = 200) -> dict[str, Any]:
    """Milliseconds of one pass by number of rows."""
    text = _text(llm, context + max(ROWS))
    seq = llm.executor.open()
    llm.executor.forward([Segment.chain(seq, text[:context], logits=[context - 1])])
    llm.executor.commit(seq, range(context))
    llama.start(text[:context])
    ours: dict[int, list[float]] = {n: [] for n in ROWS}
    theirs: dict[int, list[float]] = {n: [] for n in ROWS}
    for _ in range(args.repeats):
        for n in ROWS:
            rows = text[context : context + n]
            start = time.perf_counter()
            llm.executor.forward([Segment.chain(seq, rows)])
            ours[n].append(time.perf_counter() - start)
            llm.executor.commit(seq, ())
            theirs[n].append(llama.rows(rows))
            llama.back(n)
    llm.executor.close(seq)
    print(f"\none forward pass, context {context}: milliseconds, and times the pass over one row of the same repeat")
    print(f"{'rows':>5} {'outrider':>9} {'ratio':>6} {'llama.cpp':>10} {'ratio':>6} {'llama.cpp/outrider':>19}")
    table = {}
    for n in ROWS:
        row = [_ms(ours[n]), _ratio(ours[n], ours[1]), _ms(theirs[n]), _ratio(theirs[n], theirs[1])]
        table[n] = [*row, _ratio(theirs[n], ours[n])]
        print(f"{n:5d} {row[0]:9.2f} {row[1]:6.2f} {row[2]:10.2f} {row[3]:6.2f} {table[n][4]:19.2f}")
    return table


def prompt_speed(llm: LLM, llama: Llama, args: argparse.Namespace, length: int = 512) -> dict[str, float]:
    """Tokens per second of reading a prompt."""
    text = _text(llm, length)
    ours, theirs = [], []
    for _ in range(max(3, args.repeats // 2)):
        seq = llm.executor.open()
        start = time.perf_counter()
        llm.executor.forward([Segment.chain(seq, text, logits=[length - 1])])
        ours.append(time.perf_counter() - start)
        llm.executor.close(seq)
        theirs.append(llama.start(text))
    speed = _ratio(theirs, ours)
    mine, other = length / statistics.median(ours), length / statistics.median(theirs)
    print(f"\nprompt of {length} tokens: {mine:.0f} tokens/s, llama.cpp {other:.0f}: {speed:.2f} times as fast")
    return {"outrider": mine, "llama.cpp": other, "ratio": speed}


def decode(llm: LLM, llama: Llama, args: argparse.Namespace) -> dict[str, float]:
    """Plain decoding, answer by answer in turn."""
    pairs, overhead = [], []
    for prompt in _prompts(llm, args)[: args.repeats]:
        output = _generate(llm, prompt, args.max_tokens)
        made, seconds = llama.decode(prompt, args.max_tokens, llm.model.config.eos_token_ids)
        if made < 8 or len(output.token_ids) < 8:
            continue
        pairs.append((_speed(output), made / seconds))
        part = output.statistics
        outside = part.draft_seconds + part.accept_seconds + part.engine_seconds
        overhead.append(outside / part.rounds)
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    speed = statistics.median(a / b for a, b in pairs)
    print(
        f"\nplain decoding, {len(pairs)} answers: {mine:.1f} tokens/s, llama.cpp {other:.1f}: {speed:.2f} times as fast"
    )
    print(f"outside the forward pass: {statistics.median(overhead) * 1e3:.2f} ms a round")
    return {"outrider": mine, "llama.cpp": other, "ratio": speed, "overhead_ms": statistics.median(overhead) * 1e3}


def auto(llm: LLM, llama: Llama, args: argparse.Namespace) -> dict[str, Any]:
    """Speculation over a prompts file: each prompt by us with and without, and by llama.cpp without."""
    drafted = llm.with_speculation(args.method)
    chosen = _chosen(args)
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for prompt in chosen:
        tokens = llm.tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        if len(tokens) > 2500:
            continue
        fast, plain = _generate(drafted, tokens, args.max_tokens), _generate(llm, tokens, args.max_tokens)
        assert fast.token_ids == plain.token_ids, f"{prompt.id}: the text changed"
        made, seconds = llama.decode(tokens, args.max_tokens, llm.model.config.eos_token_ids)
        if made < 8 or len(plain.token_ids) < 8:
            continue
        length = fast.statistics.mean_acceptance_length
        rows.setdefault(prompt.category, []).append((_speed(fast), _speed(plain), made / seconds, length))
    print(f"\n{args.method} over {sum(map(len, rows.values()))} prompts, medians by category; every text identical")
    print(f"{'category':>18} {'tokens/s':>9} {'over plain':>11} {'over llama.cpp':>15} {'length':>7}")
    table = {}
    everything = [row for group in rows.values() for row in group]
    for name, part in [*rows.items(), ("all", everything)]:
        values = (
            statistics.median(r[0] for r in part),
            statistics.median(r[0] / r[1] for r in part),
            statistics.median(r[0] / r[2] for r in part),
            statistics.mean(r[3] for r in part),
        )
        table[name] = values
        print(f"{name:>18} {values[0]:9.1f} {values[1]:11.2f} {values[2]:15.2f} {values[3]:7.2f}", flush=True)
    return table


def _generate(llm: LLM, prompt: Sequence[int], count: int) -> RequestOutput:
    llm.reset_prefix_cache()
    return llm.generate(list(prompt), SamplingParams(max_tokens=count), use_tqdm=False)[0]


def _speed(output: RequestOutput) -> float:
    """Tokens per second after the first token; a speculative first round may bring several of them for free."""
    times = output.timing.token_times
    later = sum(moment > times[0] for moment in times)
    return later / max(times[-1] - times[0], 1e-9)


def _chosen(args: argparse.Namespace) -> list[Any]:
    categories = [name for name in args.categories.split(",") if name]
    return select(load_prompts(args.prompts), categories, args.limit)


def _prompts(llm: LLM, args: argparse.Namespace) -> list[list[int]]:
    chat = [llm.tokenizer.encode_chat([{"role": "user", "content": p.turns[0]}]) for p in _chosen(args)]
    return [tokens for tokens in chat if len(tokens) <= 1500]


def _text(llm: LLM, length: int) -> list[int]:
    return np.random.default_rng(0).integers(1000, llm.tokenizer.vocab_size - 1000, length).tolist()  # type: ignore[no-any-return]


def _ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


if __name__ == "__main__":
    main()
