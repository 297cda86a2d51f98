"""Show that speculation does not change the text: every drafter against plain decoding, on a file of prompts.

python benchmarks/identity.py --executor native --prompts prompts.jsonl --limit 100 --max-tokens 200 --trees random

With --trees random, every round has a budget of its own, parts of the drafts are left out, random tokens are hung into
them, and their nodes are numbered in another order: lengths and shapes that no drafter would come up with.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from outrider import LLM, EngineConfig, RequestOutput, SamplingParams
from outrider.audit.identity import KINDS, METHODS, NEAR_TIE, compare
from outrider.audit.scramble import Scrambled
from outrider.bench.prompts import OWN_PROMPTS, load_prompts


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    dtype = args.dtype or ("auto" if args.executor == "native" else "float32")
    config = EngineConfig(max_batch_size=args.batch)
    llm = LLM(args.model, "none", dtype=dtype, executor=args.executor, engine_config=config)
    prompts = encoded(llm, args)
    near_tie = 0.0 if args.executor == "native" else NEAR_TIE
    wrap = partial(Scrambled, seed=args.seed) if args.trees == "random" else None
    passed = True
    for kind in args.kinds.split(","):
        params = [SamplingParams(max_tokens=args.max_tokens, seed=i, **KINDS[kind]) for i in range(len(prompts))]
        plain = answer(llm, prompts, params)
        for method in args.methods.split(","):
            started = time.perf_counter()
            drafted = answer(llm.with_speculation(configuration(args, method), wrap), prompts, params)
            report = compare(llm, params, plain, drafted, near_tie=near_tie)
            total = [output.statistics for output in drafted]
            print(
                f"{kind:8} {method:16} {report}; {sum(s.accepted for s in total)} of {sum(s.drafted for s in total)} "
                f"draft tokens accepted, {time.perf_counter() - started:.0f} s",
                flush=True,
            )
            for difference in (*report.differences, *report.near_ties):
                print(f"    {difference}")
            passed &= report.passes
    return 0 if passed else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model", default="smollm2-135m")
    parser.add_argument("--executor", choices=["torch", "native"], default="torch")
    parser.add_argument("--dtype", help="torch: float32 (default), bfloat16 or float16")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS, help="JSONL file (default: the package's own)")
    parser.add_argument("--limit", type=int, default=40, help="prompts, spread evenly over the file")
    parser.add_argument("--longest", type=int, help="leave out prompts of more tokens than this")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="requests at a time at most")
    parser.add_argument("--nodes", type=int, default=8, help="draft nodes a round at most")
    parser.add_argument("--trees", choices=["drafted", "random"], default="drafted")
    parser.add_argument("--seed", type=int, default=0, help="of the random trees")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--kinds", default=",".join(KINDS), help="greedy, sampled, or both")
    return parser.parse_args(argv)


def encoded(llm: LLM, args: argparse.Namespace) -> list[list[int]]:
    texts = [prompt.turns[0] for prompt in load_prompts(args.prompts)]
    tokens = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    fitting = [prompt for prompt in tokens if args.longest is None or len(prompt) <= args.longest]
    return fitting[:: max(1, len(fitting) // args.limit)][: args.limit]


def configuration(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """The whole budget every round: the more rows are verified, the more there is to go wrong."""
    config = {"method": method, "adaptive": False, "num_speculative_tokens": args.nodes}
    return config | ({"model": args.draft_model} if method == "draft_model" else {})


def answer(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


if __name__ == "__main__":
    sys.exit(main())
