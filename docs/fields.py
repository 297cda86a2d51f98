"""Keep the tables of the docs in step with the code that they describe.

    python docs/fields.py            rewrite what stands between the markers of every page
    python docs/fields.py --check    only say whether something would change; exit code 1 if so

A marker is a line ``<!-- table: NAME -->``; what follows, up to ``<!-- end -->``, is generated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from outrider.bench.measure import DEFINITIONS
from outrider.cli.parser import field_help
from outrider.cli.speculation import SGLANG_ALGORITHMS
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.serve.config import ServerConfig
from outrider.serve.metrics import COUNTERS, GAUGES, PLANS, PREFIX
from outrider.serve.protocol.chat import ChatMessage, ChatRequest, Function, JsonSchema
from outrider.serve.protocol.completions import CompletionRequest
from outrider.serve.protocol.sampling import StreamOptions
from outrider.train.config import TrainConfig
from outrider.train.data_config import DataConfig
from outrider.train.modules.base import Shape

DOCS = Path(__file__).parent


def config_table(cls: type[Any]) -> list[str]:
    """Key, default and meaning of every field of a configuration class."""
    values = cls()
    helps = field_help(cls)
    rows = [f"| `{f.name}` | `{getattr(values, f.name)!r}` | {helps[f.name]} |" for f in fields(cls)]
    return ["| key | default | meaning |", "| --- | --- | --- |", *rows]


def two_columns(head: tuple[str, str], entries: dict[str, str]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| `{a}` | {b} |" for a, b in entries.items())]


def refused_fields() -> dict[str, str]:
    """Fields of OpenAI's API that the server refuses, with what to do instead."""
    found: dict[str, str] = {}
    for body in (CompletionRequest, ChatRequest, ChatMessage):
        found |= {name: why for name, why in body.refused.items() if name not in found}
    return dict(sorted(found.items()))


def fields_without_effect() -> dict[str, str]:
    """Fields of OpenAI's API that the server accepts and does nothing with, with the reason where there is one."""
    found: dict[str, list[str]] = {}
    for body in (ChatRequest, ChatMessage, Function, JsonSchema, StreamOptions):
        for name, item in body.model_fields.items():
            text = item.description or ""
            if text.startswith("without effect"):
                found.setdefault(name, []).append(text.removeprefix("without effect").removeprefix(": ") or "accepted")
    return {name: "; ".join(reasons) for name, reasons in sorted(found.items())}


def metric_names() -> dict[str, str]:
    """The engine's own figures in /metrics."""
    gauges = {PREFIX + name: text for name, (_, text) in GAUGES.items()}
    return gauges | {f"{PREFIX}{name}_total": text for name, (_, text) in (COUNTERS | PLANS).items()}


TABLES: dict[str, Callable[[], list[str]]] = {
    "SpeculativeConfig": lambda: config_table(SpeculativeConfig),
    "SamplingParams": lambda: config_table(SamplingParams),
    "EngineConfig": lambda: config_table(EngineConfig),
    "ServerConfig": lambda: config_table(ServerConfig),
    "DataConfig": lambda: config_table(DataConfig),
    "TrainConfig": lambda: config_table(TrainConfig),
    "Shape": lambda: config_table(Shape),
    "refused": lambda: two_columns(("field", "why, or what to do instead"), refused_fields()),
    "ineffective": lambda: two_columns(("field", "why"), fields_without_effect()),
    "metrics": lambda: two_columns(("metric", "meaning"), metric_names()),
    "definitions": lambda: two_columns(("figure", "definition"), DEFINITIONS),
    "sglang": lambda: two_columns(
        ("`--speculative-algorithm`", "`method`"), {name: f"`{own}`" for name, own in SGLANG_ALGORITHMS.items()}
    ),
}


def generated(text: str) -> str:
    """The page with every table between markers written anew. Raises KeyError for a marker that names no table."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n" + "\n".join(TABLES[found[2]]()) + "\n\n" + found[3],
        text,
        flags=re.S,
    )


def main() -> int:
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = generated(before)
        if before != after:
            stale.append(page.name)
            if "--check" not in sys.argv[1:]:
                page.write_text(after, encoding="utf-8")
    if stale:
        print(f"{'stale' if '--check' in sys.argv[1:] else 'rewritten'}: {', '.join(stale)}")
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
