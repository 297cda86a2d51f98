"""Time one forward pass of the native executor by number of rows, next to what the memory can deliver.

    python benchmarks/native_forward.py MODEL [--context 200] [--repeats 15] [--threads 2]

Rounds are interleaved: in each, memory is read once (as many bytes as the packed weights) and then every number of rows
is timed, so that a neighbour on the machine disturbs all columns alike. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from outrider import _native
from outrider.executors.base import Segment
from outrider.executors.native import default_threads
from outrider.executors.native.executor import NativeExecutor
from outrider.models.loader import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="an alias, a file or a folder")
    parser.add_argument("--context", type=int, default=200, help="committed tokens before the rows")
    parser.add_argument("--rows", default="1,2,4,8,16,32", help="numbers of rows to time")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--quantization", choices=["int8", "int4"])
    args = parser.parse_args()
    rows = [int(part) for part in args.rows.split(",")]

    start = time.perf_counter()
    executor = NativeExecutor(
        load_model(args.model),
        kv_tokens=args.context + max(rows) + 32,
        threads=args.threads,
        quantization=args.quantization,
    )
    print(f"{args.model}: loaded in {time.perf_counter() - start:.2f} s, {executor.isa}, {args.threads} threads")
    generator = np.random.default_rng(0)
    text = generator.integers(0, executor.config.vocab_size, args.context + max(rows)).tolist()
    seq = executor.open()
    start = time.perf_counter()
    executor.forward([Segment.chain(seq, text[: args.context], logits=[args.context - 1])])
    print(f"prompt of {args.context} tokens: {args.context / (time.perf_counter() - start):.0f} tokens/s")
    executor.commit(seq, range(args.context))

    weights = executor.weight_bytes
    pool = _native.ThreadPool(args.threads)
    memory = _native.Arena(weights)
    times: dict[int, list[float]] = {n: [] for n in rows}
    reads: list[float] = []
    for _ in range(args.repeats):
        reads.append(_native.seconds_to_read(memory.data, pool))
        for n in rows:
            start = time.perf_counter()
            executor.forward([Segment.chain(seq, text[args.context : args.context + n])])
            times[n].append(time.perf_counter() - start)
            executor.commit(seq, ())
    report(rows, times, statistics.median(reads), weights)


def report(rows: list[int], times: dict[int, list[float]], read: float, weights: int) -> None:
    one = statistics.median(times[rows[0]])
    print(
        f"packed weights {weights / 1e6:.0f} MB, read bandwidth {weights / read / 1e9:.1f} GB/s ({read * 1e3:.1f} ms)"
    )
    print(f"{'rows':>5} {'ms':>8} {'ratio':>6} {'of bandwidth':>13} {'fastest ms':>11}")
    for n in rows:
        seconds = statistics.median(times[n])
        print(f"{n:5d} {seconds * 1e3:8.2f} {seconds / one:6.2f} {read / seconds:13.2f} {min(times[n]) * 1e3:11.2f}")


if __name__ == "__main__":
    main()
