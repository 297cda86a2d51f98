"""What the native executor costs beside its forward passes: Python and sampling per round, memory, and loading.

    python benchmarks/overhead.py --model qwen2.5-coder-1.5b [--parts rounds,memory,load] [--tokens 64] [--repeats 3]

rounds: the time of each round outside the native forward pass, for one request; greedy and sampled, plain and drafted.
memory: the peak of a process that fills a context, over packed weights plus KV cache.
load: seconds until a model is ready, its file in the page cache: packed anew, and from the packed copy on disk.

Memory and loading are measured in processes of their own. Medians; nothing is tuned and nothing is judged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.audit.identity import KINDS
from outrider.bench.table import format_table
from outrider.core.config import EngineConfig
from outrider.executors.native.executor import NativeExecutor
from outrider.models.loader import load_model

PROMPT = "Write a function that reads a CSV file and returns the mean of every numeric column, then explain each line."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="an alias, a file or a folder")
    parser.add_argument("--parts", default="rounds,memory,load")
    parser.add_argument("--methods", default="none,auto")
    parser.add_argument("--tokens", type=int, default=64, help="rounds: length of each answer")
    parser.add_argument("--context", type=int, default=2048, help="memory: tokens that are filled in")
    parser.add_argument("--repeats", type=int, default=3, help="load: how often")
    args = parser.parse_args()
    source = load_model(args.model).source  # fetched now, if need be
    assert source is not None
    parts: dict[str, Callable[[], None]] = {
        "rounds": lambda: rounds(args),
        "memory": lambda: report_memory(alone(memory, args.model, args.context)),
        "load": lambda: loading(args, source),
    }
    for name in args.parts.split(","):
        print(f"\n{name}: {args.model}")
        parts[name]()


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# -- rounds ------------------------------------------------------------------------------------------------------------


class TimedSession:
    """Stands before an executor's native session and adds up the time in its forward passes."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.seconds = 0.0

    def forward(self, *arguments: Any) -> None:
        start = time.perf_counter()
        self._session.forward(*arguments)
        self.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def rounds(args: argparse.Namespace) -> None:
    llm = LLM(args.model, "none", executor="native")
    executor = llm.executor
    assert isinstance(executor, NativeExecutor)
    session = executor._session = TimedSession(executor._session)  # type: ignore[assignment]
    print(
        f"vocabulary {llm.model.config.vocab_size}, {executor.isa}; milliseconds a round, without the one of the prompt"
    )
    header = ["method", "kind", "rounds", "round", "native", "outside", "p95", "draft", "accept", "engine", "rest"]
    rows = []
    for method in args.methods.split(","):
        for kind, settings in KINDS.items():
            params = SamplingParams(max_tokens=args.tokens, seed=0, ignore_eos=True, **settings)
            drafting = llm.with_speculation(method)
            time_rounds(drafting, session, params, tenant="warm-up")
            rows.append([method, kind, *time_rounds(drafting, session, params, tenant="measured")])
    print(format_table(header, rows, align="ll"))
    print("round, native, outside: medians. draft, accept, engine: means, over all rounds; rest: of outside")


def time_rounds(llm: LLM, session: TimedSession, params: SamplingParams, *, tenant: str) -> list[str]:
    """Answer once: the number of rounds, and the times as `rounds` prints them.

    tenant: one that has not asked before, or drafters would know the answer.
    """
    whole: list[float] = []
    native: list[float] = []
    stream = llm.stream_chat([{"role": "user", "content": PROMPT}], params, tenant=tenant)
    output = None
    while output is None:
        session.seconds, start = 0.0, time.perf_counter()
        output = next(stream).output
        whole.append(time.perf_counter() - start)
        native.append(session.seconds)
    outside = sorted(a - b for a, b in zip(whole[1:], native[1:], strict=True))
    stats = output.statistics
    spent = [seconds / len(whole) for seconds in (stats.draft_seconds, stats.accept_seconds, stats.engine_seconds)]
    times = [statistics.median(whole[1:]), statistics.median(native[1:]), statistics.median(outside)]
    times += [outside[int(0.95 * (len(outside) - 1))], *spent, statistics.mean(outside) - sum(spent)]
    return [str(len(outside)), *(f"{1e3 * value:.2f}" for value in times)]


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(model: str, context: int) -> dict[str, float]:
    """Bytes of this process: before the model, at the peak, and what they are to be compared with."""
    import torch  # noqa: F401  (what an engine imports is no cost of the model)

    before = peak_bytes()
    config = EngineConfig(max_batch_size=1, max_context=context, kv_tokens=context + 64)
    llm = LLM(model, "auto", executor="native", engine_config=config)
    assert isinstance(llm.executor, NativeExecutor)
    prompt = (llm.tokenizer.encode(PROMPT) * context)[: context - 32]
    llm.generate([prompt], SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
    shape = llm.model.config
    row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2  # keys and values, bfloat16
    return {
        "before": before,
        "peak": peak_bytes(),
        "weights": llm.executor.weight_bytes,
        "kv": row * llm.executor.total_tokens,
    }


def peak_bytes() -> int:
    """The most memory this process ever had resident. Not getrusage: a new process inherits its parent's peak there."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def report_memory(found: dict[str, float]) -> None:
    wanted = found["weights"] + found["kv"]
    mib = {name: value / 2**20 for name, value in found.items()}
    print(f"packed weights {mib['weights']:.0f} MiB, KV cache {mib['kv']:.0f} MiB")
    print(f"peak {mib['peak']:.0f} MiB, of which {mib['before']:.0f} MiB before the model was loaded (Python, PyTorch)")
    print(f"peak over packed weights + KV cache: {found['peak'] / wanted:.2f}")


# -- load --------------------------------------------------------------------------------------------------------------


def loading(args: argparse.Namespace, source: Path) -> None:
    read_through(source)
    first: list[float] = []
    packed: list[float] = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory(prefix="overhead-") as cache:
            first.append(alone(load_seconds, str(source), cache))
            packed.append(alone(load_seconds, str(source), cache))
    fresh = [alone(load_seconds, str(source), None) for _ in range(args.repeats)]
    for what, values in (
        ("first time: sha256, packing, writing the packed copy", first),
        ("packing alone, nothing kept on disk", fresh),
        ("from the packed copy", packed),
    ):
        print(f"{what:55} {statistics.median(values):6.2f} s   ({', '.join(f'{value:.2f}' for value in values)})")


def load_seconds(model: str, cache: str | None) -> float:
    """From the path of a model to an executor that is ready, imports not counted."""
    import torch  # noqa: F401

    if cache is not None:
        os.environ["OUTRIDER_CACHE"] = cache
    start = time.perf_counter()
    NativeExecutor(load_model(model), kv_tokens=2048, max_context=2048, packed_cache=cache is not None)
    return time.perf_counter() - start


def read_through(source: Path) -> None:
    """Bring the model's files into the page cache."""
    for file in [source] if source.is_file() else source.glob("*.safetensors"):
        with open(file, "rb") as stream:
            while stream.read(1 << 24):
                pass


if __name__ == "__main__":
    main()
