"""Perplexity of a text under the native executor and under the torch executor in float32, on the same weights.

    python benchmarks/perplexity.py MODEL [--text FILE] [--tokens 1024] [--quantization int8|int4]

What the native executor rounds (activations, keys and values) shows here, as far as it matters. The text is one that no
model has been trained on word by word: by default, this project's own documentation.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Sequence
from pathlib import Path

from outrider.executors.base import Executor, Segment
from outrider.executors.native.executor import NativeExecutor
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.loader import Model, load_model

CHUNK = 128
ROOT = Path(__file__).resolve().parents[1]


def default_text() -> str:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n\n".join(page.read_text(encoding="utf-8") for page in pages)


def negative_log_likelihoods(executor: Executor, tokens: Sequence[int]) -> list[float]:
    """Of each token but the first, in nats."""
    seq = executor.open()
    losses: list[float] = []
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[start : start + CHUNK]
        logprobs = executor.forward([Segment.chain(seq, chunk)]).logits.log_softmax(-1)
        executor.commit(seq, range(len(chunk)))
        for row, following in zip(logprobs, tokens[start + 1 : start + 1 + CHUNK], strict=False):
            losses.append(-float(row[following]))
    return losses


def open_native(model: Model, tokens: int, quantization: str | None) -> Executor:
    return NativeExecutor(model, kv_tokens=tokens + CHUNK, quantization=quantization)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="an alias, a file or a folder")
    parser.add_argument("--text", type=Path, help="default: the project's documentation")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    args = parser.parse_args()

    model = load_model(args.model)
    if model.tokenizer is None:
        parser.error("the model has no tokenizer")
    text = args.text.read_text(encoding="utf-8") if args.text else default_text()
    tokens = model.tokenizer.encode(text)[: args.tokens]
    native = negative_log_likelihoods(open_native(model, len(tokens), args.quantization), tokens)
    gc.collect()
    oracle = negative_log_likelihoods(TorchExecutor(model, dtype="float32", kv_tokens=len(tokens) + CHUNK), tokens)

    count = len(native)
    differences = [a - b for a, b in zip(native, oracle, strict=True)]
    mean = sum(differences) / count
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1))
    print(f"{args.model}: {len(tokens)} tokens")
    print(f"native          {math.exp(sum(native) / count):8.4f}")
    print(f"torch, float32  {math.exp(sum(oracle) / count):8.4f}")
    print(f"ratio           {math.exp(mean):8.4f} +- {deviation / math.sqrt(count):.4f} (one standard error)")


if __name__ == "__main__":
    main()
