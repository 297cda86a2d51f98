"""``outrider bench``: measure methods against plain decoding, interleaved, on the prompts of a file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.options import add_model, add_sampling, model_name, open_llm, sampling
from outrider.cli.parser import given
from outrider.core.config import SpeculativeConfig
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.methods import Method
    from outrider.bench.prompts import Prompt
    from outrider.bench.runner import Settings
    from outrider.engine.llm import LLM

DEFAULT_METHODS = "none,ngram,suffix,recycle,auto"
_DEFAULTS = {"max_tokens": 128, "seed": 0}
"""Where bench departs from `SamplingParams`: short answers, and a seed, so that every method draws the same noise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, positional=True)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--prompts", metavar="FILE", type=Path, help="JSON lines with id, category, turns (default: the package's own)"
    )
    group.add_argument(
        "--methods",
        metavar="LIST",
        default=DEFAULT_METHODS,
        help=f"comma-separated: names, names joined by +, or JSON objects (default: {DEFAULT_METHODS})",
    )
    group.add_argument("--draft-model", metavar="MODEL", help="the drafter's model, for method draft_model")
    group.add_argument("--categories", metavar="LIST", default="", help="comma-separated; default: all")
    group.add_argument("--limit", metavar="N", type=int, help="prompts of each category at most")
    group.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    group.add_argument(
        "--shared-tenant",
        action="store_true",
        help="let drafters remember the answers to earlier prompts; default: each conversation is a tenant of its own",
    )
    group.add_argument(
        "--output", metavar="FILE", type=Path, help="where the results go (default: results/bench-DATE-TIME.json)"
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="also draw the planner's choices: draft budget against acceptance, and speed-up by category (needs "
        "matplotlib: pip install 'outrider[plot]')",
    )
    add_sampling(parser, _DEFAULTS, leave_out=["logprobs"])


def run(args: argparse.Namespace) -> int:
    """Measure, print and save; returns 0, 1 if any answer failed, or 130 if the run was interrupted."""
    from outrider.bench import plot, report
    from outrider.bench.methods import baseline, parse_methods
    from outrider.bench.prompts import load_prompts, select
    from outrider.bench.runner import Settings
    from outrider.bench.runner import run as measure
    from outrider.cli.terminal import note
    from outrider.engine.names import check_names

    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit={args.limit} must be at least 1")
    params = sampling(args, _DEFAULTS)
    methods = parse_methods(args.methods, args.draft_model)
    for method in methods:
        check_names(method.config)
    categories = [name.strip() for name in args.categories.split(",") if name.strip()]
    prompts = select(load_prompts(args.prompts), categories, args.limit)
    output = args.output or Path("results", time.strftime("bench-%Y%m%d-%H%M%S.json"))
    report.check_output(output)
    if args.plot is not None:
        plot.check(args.plot)
    if baseline(methods) is None:
        note("'none' is not among the methods: there will be no speed-up")
    # Each method gets a drafter of its own.
    llm = open_llm(args, SpeculativeConfig(method="none"), reserve_for=[method.config for method in methods])
    settings = Settings(params, args.system, args.shared_tenant)
    context = _context(args, llm, methods, settings)
    with _Progress(sum(len(prompt.turns) for prompt in prompts) * len(methods)) as progress:
        result = measure(llm, methods, prompts, settings, progress)
    context["machine"]["read_bytes_per_second_after"] = _bandwidth()
    summaries = report.summarise(result)
    print(report.format_report(summaries))
    record = report.to_record(result, summaries, context)
    report.save(record, output)
    for failure in result.failures:
        note(f"failed: {failure.prompt_id}, turn {failure.turn}, {failure.method}: {failure.error}")
    note(f"saved {output}")
    if args.plot is not None:
        plot.draw(record, args.plot)
        note(f"drew {args.plot}")
    if result.interrupted:
        return 130
    return 1 if result.failures else 0


def _context(args: argparse.Namespace, llm: LLM, methods: list[Method], settings: Settings) -> dict[str, Any]:
    """What was measured, with what and on what: the part of the results that is known before the run."""
    from outrider.bench import machine
    from outrider.bench.prompts import OWN_PROMPTS

    curve = llm.cost_curve
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "configuration": {
            "model": model_name(args),
            "executor": llm.executor_name,
            "dtype": args.dtype,
            "device": args.device,
            "quantization": args.quantization,
            "quantization_error": asdict(llm.quantization_error) if llm.quantization_error else None,
            "threads": args.threads,
            "engine": given(args, "engine"),
            "methods": {method.label: asdict(method.config) for method in methods},
            "prompts": (args.prompts or OWN_PROMPTS).name,
            "categories": args.categories,
            "limit": args.limit,
            "system": settings.system,
            "shared_tenant": settings.shared_tenant,
            "sampling": asdict(settings.params),
        },
        "cost_curve": {"rows": list(curve.rows), "seconds": list(curve.seconds)},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "machine": {**machine.describe_machine(), "read_bytes_per_second_before": _bandwidth()},
    }


def _bandwidth() -> float:
    from outrider.bench.machine import read_bandwidth

    return read_bandwidth()


class _Progress:
    """A bar on a terminal that says which answer is being measured."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="answer", disable=not sys.stderr.isatty())
        self._started = False

    def __enter__(self) -> Callable[[Prompt, Method], None]:
        return self._next

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def _next(self, prompt: Prompt, method: Method) -> None:
        if self._started:
            self._bar.update()
        self._started = True
        self._bar.set_description_str(f"{prompt.id} {method.label}")
