"""Plain greedy decoding: the torch executor next to Hugging Face `generate`, on the same weights, dtype and machine.

    python benchmarks/decode_vs_transformers.py smollm2-135m --dtype bfloat16 --tokens 64

`executor` is a bare loop (forward, argmax, commit), `engine` is `LLM.generate` with method `none`, and `transformers`
is its `generate(use_cache=True)` over the same weights, as plain tensors of that dtype. All three continue the same
prompts, past any end-of-sequence token. A measurement is the time from a run's first new token to its last, per token;
runs are interleaved, figures are medians. Also timed, in the same rounds: the executor's forward pass by number of
rows, next to the time in which memory delivers the weights.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider import LLM, SamplingParams
from outrider.bench.machine import commit, describe_machine, read_bandwidth, versions
from outrider.bench.prompts import load_prompts
from outrider.bench.report import check_output, save
from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.config import weight_shapes
from outrider.models.loader import Model, load_model

ROWS = (1, 2, 4, 8, 16, 32)

Run = tuple[list[int], float]
"""New tokens, and seconds per token from the first one to the last."""


class Executor:
    def __init__(self, model: Model, dtype: str, context: int) -> None:
        self.executor = TorchExecutor(model, dtype=dtype, kv_tokens=2 * context, max_context=context)
        sizes = weight_shapes(model.config)
        table = 0 if model.config.tie_embeddings else math.prod(sizes["model.embed_tokens.weight"])
        self.weight_bytes = (sum(map(math.prod, sizes.values())) - table) * self.executor.dtype.itemsize

    def __call__(self, prompt: Sequence[int], count: int) -> Run:
        executor = self.executor
        seq = executor.open()
        output = executor.forward([Segment.chain(seq, prompt, logits=[len(prompt) - 1])])
        executor.commit(seq, range(len(prompt)))
        tokens = [int(output.logits[0].argmax())]
        start = time.perf_counter()
        while len(tokens) < count:
            output = executor.forward([Segment.chain(seq, tokens[-1:])])
            executor.commit(seq, [0])
            tokens.append(int(output.logits[0].argmax()))
        seconds = time.perf_counter() - start
        executor.close(seq)
        return tokens, seconds / (count - 1)

    def forward_seconds(self, prompt: Sequence[int]) -> dict[int, float]:
        """Seconds of a forward pass after ``prompt``, by number of rows."""
        executor = self.executor
        seq = executor.open()
        executor.forward([Segment.chain(seq, prompt, logits=())])
        executor.commit(seq, range(len(prompt)))
        seconds = {}
        for rows in ROWS:
            start = time.perf_counter()
            executor.forward([Segment.chain(seq, [prompt[-1]] * rows)])
            seconds[rows] = time.perf_counter() - start
            executor.commit(seq, ())
        executor.close(seq)
        return seconds


class Engine:
    def __init__(self, model: Model, dtype: str) -> None:
        self.llm = LLM(model, "none", executor="torch", dtype=dtype)

    def __call__(self, prompt: Sequence[int], count: int) -> Run:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        output = self.llm.generate([list(prompt)], params, use_tqdm=False)[0]
        return list(output.token_ids), output.timing.decode_seconds / (count - 1)


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when each token arrives. The first call hands over the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        if model.source is None or not model.source.is_file():
            raise SystemExit("this comparison needs a model in a GGUF file")
        config = transformers.AutoConfig.from_pretrained(model.source.parent, gguf_file=model.source.name)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        # Not from_pretrained: that keeps the file's quantised weights and computes in float32, several times slower.
        weights = {name: model.weights.tensor(name, dtype) for name in model.weights.names()}
        missing = self.model.load_state_dict(weights, strict=False, assign=True)
        assert not missing.unexpected_keys
        assert set(missing.missing_keys) <= {"lm_head.weight"}
        self.model.tie_weights()
        self.model.generation_config.eos_token_id = None

    def __call__(self, prompt: Sequence[int], count: int) -> Run:
        clock = Clock()
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": count, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
        return output[0, len(prompt) :].tolist(), (clock.times[-1] - clock.times[1]) / (count - 1)


def measure(
    runners: dict[str, Callable[[Sequence[int], int], Run]], prompts: Sequence[Sequence[int]], count: int, rounds: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """Every runner on every prompt, in turn, after one warm-up each; and the read bandwidth in every round."""
    for runner in runners.values():
        runner(prompts[0], 4)
    records, bandwidth = [], []
    for number in range(rounds):
        bandwidth.append(read_bandwidth())
        for which, prompt in enumerate(prompts):
            record: dict[str, Any] = {"round": number, "prompt": which}
            order = list(runners) if (number + which) % 2 == 0 else list(reversed(runners))
            for name in order:
                tokens, seconds = runners[name](prompt, count)
                record[name] = {"seconds_per_token": seconds, "tokens": tokens}
            executor = runners["executor"]
            assert isinstance(executor, Executor)
            record["forward_seconds"] = executor.forward_seconds(prompt)
            records.append(record)
    return records, bandwidth


def report(records: Sequence[dict[str, Any]], bandwidth: Sequence[float], weight_bytes: int) -> dict[str, Any]:
    """Print the tables; return what they say."""
    summary: dict[str, Any] = {"bandwidth_bytes_per_second": statistics.median(bandwidth), "weight_bytes": weight_bytes}
    stream = weight_bytes / statistics.median(bandwidth)
    print(
        f"\nweights {weight_bytes / 1e6:.0f} MB at {statistics.median(bandwidth) / 1e9:.1f} GB/s: {stream * 1e3:.1f} ms"
    )
    print(f"\n{'':14}{'ms/token':>10}{'fastest':>10}{'speed-up':>10}   tokens as transformers")
    for name in ("transformers", "engine", "executor"):
        seconds = [record[name]["seconds_per_token"] for record in records]
        ratios = [record["transformers"]["seconds_per_token"] / record[name]["seconds_per_token"] for record in records]
        alike = statistics.mean(
            sum(map(int.__eq__, record[name]["tokens"], record["transformers"]["tokens"])) / len(record[name]["tokens"])
            for record in records
        )
        summary[name] = {
            "seconds_per_token": statistics.median(seconds),
            "speedup": statistics.median(ratios),
            "alike": alike,
        }
        figures = (statistics.median(seconds) * 1e3, min(seconds) * 1e3, statistics.median(ratios))
        print(f"{name:14}" + "".join(f"{figure:10.2f}" for figure in figures) + f"   {alike:.0%}")
    print(f"\n{'rows':14}" + "".join(f"{rows:8d}" for rows in ROWS))
    summary["forward_seconds"] = {
        rows: statistics.median(record["forward_seconds"][rows] for record in records) for rows in ROWS
    }
    print(f"{'ms/forward':14}" + "".join(f"{summary['forward_seconds'][rows] * 1e3:8.1f}" for rows in ROWS))
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an alias, or a GGUF file")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a run")
    parser.add_argument("--prompts", type=int, default=4, help="prompts, of those that come with the package")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: PyTorch's own choice")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/decode_vs_transformers.json"))
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    check_output(args.output)
    model = load_model(args.model)
    engine = Engine(model, args.dtype)
    prompts = [
        engine.llm.tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        for prompt in load_prompts()[: args.prompts]
    ]
    executor = Executor(model, args.dtype, max(map(len, prompts)) + args.tokens + max(ROWS))
    runners: dict[str, Callable[[Sequence[int], int], Run]] = {
        "transformers": Transformers(model, executor.executor.dtype),
        "engine": engine,
        "executor": executor,
    }
    machine = describe_machine()
    print(
        f"{args.model}, {args.dtype}, {torch.get_num_threads()} threads, prompts of {[len(p) for p in prompts]} tokens"
    )
    print(f"machine: {machine}")
    records, bandwidth = measure(runners, prompts, args.tokens, args.rounds)
    summary = report(records, bandwidth, executor.weight_bytes)
    settings = {name: str(value) for name, value in vars(args).items()} | {"torch_threads": torch.get_num_threads()}
    about = {"settings": settings, "machine": machine, "versions": versions(), "commit": commit()}
    save(about | {"bandwidth": bandwidth, "summary": summary, "runs": records}, args.output)
    print(f"\nsaved to {args.output}")


if __name__ == "__main__":
    main()
