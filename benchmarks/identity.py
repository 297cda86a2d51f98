"""Show that speculation does not change the text: every drafter against plain decoding, on a file of prompts.

python benchmarks/identity.py --model smollm2-135m --dtype float32 --prompts prompts.jsonl --limit 40
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider import LLM, RequestOutput, SamplingParams
from outrider.audit.identity import NEAR_TIE, compare
from outrider.bench.prompts import OWN_PROMPTS, load_prompts

SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
}
MOST_FLIPS = 1 / 2000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model", default="smollm2-135m")
    parser.add_argument("--executor", default="torch")
    parser.add_argument("--dtype", default="float32", help="auto for the native executor")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS, help="JSONL file (default: the package's own)")
    parser.add_argument("--limit", type=int, default=40, help="prompts, spread evenly over the file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=8, help="draft nodes a round")
    parser.add_argument("--methods", default="ngram,suffix,recycle,suffix+recycle,draft_model")
    args = parser.parse_args()

    llm = LLM(args.model, "none", dtype=args.dtype, executor=args.executor)
    every = load_prompts(args.prompts)
    chosen = every[:: max(1, len(every) // args.limit)][: args.limit]
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": p.turns[0]}]) for p in chosen]
    failed = False
    for kind, settings in (("greedy", {}), ("sampled", SAMPLED)):
        params = [SamplingParams(max_tokens=args.max_tokens, seed=i, **settings) for i in range(len(prompts))]
        plain = answer(llm, prompts, params)
        for method in args.methods.split(","):
            # The whole budget every round: the more rows are verified, the more there is to go wrong.
            config: dict[str, Any] = {"method": method, "adaptive": False, "num_speculative_tokens": args.nodes}
            config |= {"model": args.draft_model} if method == "draft_model" else {}
            drafted = answer(llm.with_speculation(config), prompts, params)
            near_tie = 0.0 if args.executor == "native" else NEAR_TIE
            report = compare(llm, params, plain, drafted, near_tie=near_tie)
            accepted = sum(output.statistics.accepted for output in drafted)
            print(f"{kind:8} {method:16} {report}; {accepted} draft tokens accepted", flush=True)
            for difference in (*report.differences, *report.near_ties):
                print(f"    {difference}")
            failed |= bool(report.differences) or len(report.near_ties) > MOST_FLIPS * report.tokens
    return int(failed)


def answer(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


if __name__ == "__main__":
    sys.exit(main())
