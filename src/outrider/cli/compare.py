"""``outrider generate --compare``: the same request with and without speculation, side by side."""

from __future__ import annotations

import argparse
import json
import math
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.audit import identity
from outrider.bench import measure
from outrider.bench.table import format_table
from outrider.cli.generate import EXIT_INTERRUPTED, output_record
from outrider.cli.options import model_name
from outrider.cli.terminal import note, painter, stream_answer, to_stdout

if TYPE_CHECKING:
    from outrider.cli.question import Question
    from outrider.core.sampling import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import RequestOutput

_WARM_UP = "A warm-up, so that neither run pays for first calls."
_WARM_UP_TOKENS = 8


def compare(llm: LLM, asked: Question, params: SamplingParams, args: argparse.Namespace) -> int:
    """Stream the answer with speculation, repeat it without, and print what speculation saved.

    Returns 0 if both gave the same tokens, 1 if not, 130 if the user stopped either.
    """
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(64))
    plain_llm = llm.with_speculation("none")
    for each in (plain_llm, llm):
        _warm_up(each)
    show = (lambda text: None) if args.json else to_stdout
    fast = stream_answer(asked.stream(llm, params), show, painter(llm, params) if args.show_drafts else None)
    show("\n")
    if fast.output is None or fast.interrupted:
        return EXIT_INTERRUPTED
    note("the same again without speculation …")
    plain = stream_answer(asked.stream(plain_llm, params), lambda text: None)
    if plain.output is None or plain.interrupted:
        return EXIT_INTERRUPTED
    at = plain.output.first_difference(fast.output)
    if args.json:
        record = {
            "model": model_name(args),
            "method": llm.speculative_config.method,
            "speedup": _speedup(plain.output, fast.output),
            "identical": at is None,
            "first_difference": at,
            "plain": output_record(plain.output),
            "speculative": output_record(fast.output),
        }
        print(json.dumps(record, ensure_ascii=False))
    else:
        print("\n" + comparison_table(plain.output, fast.output, llm.speculative_config.method))
        print("\n" + _verdict(llm, params, plain.output, fast.output, at))
    return 0 if at is None else 1


def _warm_up(llm: LLM) -> None:
    from outrider.core.sampling import SamplingParams

    llm.generate(_WARM_UP, SamplingParams(max_tokens=_WARM_UP_TOKENS), use_tqdm=False, tenant="warm-up")


def comparison_table(plain: RequestOutput, fast: RequestOutput, method: str) -> str:
    """Plain decoding and speculation, one figure a line."""
    rows = [
        ["output tokens", *(str(len(output.token_ids)) for output in (plain, fast))],
        ["seconds", *(f"{measure.seconds(output):.2f}" for output in (plain, fast))],
        ["tokens/s", *(f"{measure.tokens_per_second(output):.1f}" for output in (plain, fast))],
        ["speed-up", "", f"{_speedup(plain, fast):.2f}x"],
        ["tokens/s after the first", *(f"{measure.decode_tokens_per_second(o):.1f}" for o in (plain, fast))],
        ["time to first token", *(f"{output.timing.ttft * 1000:.0f} ms" for output in (plain, fast))],
        ["rounds", *(str(output.statistics.rounds) for output in (plain, fast))],
        ["acceptance rate", "", f"{fast.statistics.acceptance_rate:.1%} of {fast.statistics.drafted} drafted"],
        ["mean acceptance length", *(f"{o.statistics.mean_acceptance_length:.2f}" for o in (plain, fast))],
    ]
    for part in ("draft", "verify", "accept", "engine"):
        times = (getattr(output.statistics, f"{part}_seconds") for output in (plain, fast))
        rows.append([f"time in {part}", *(f"{time:.2f} s" for time in times)])
    return format_table(["", "plain", method], rows)


def _speedup(plain: RequestOutput, fast: RequestOutput) -> float:
    slow = measure.tokens_per_second(plain)
    return measure.tokens_per_second(fast) / slow if slow else 0.0


def _verdict(llm: LLM, params: SamplingParams, plain: RequestOutput, fast: RequestOutput, at: int | None) -> str:
    if at is None:
        return "identical output: yes"
    found = [
        repr(llm.tokenizer.decode(output.token_ids[at : at + 1])) if at < len(output.token_ids) else "the end"
        for output in (plain, fast)
    ]
    line = f"identical output: no (first difference at output token {at}: plain {found[0]}, with drafts {found[1]}"
    report = identity.compare(llm, [params], [plain], [fast])
    margin = [*report.differences, *report.near_ties][0].margin
    line += f"; the target scores them {margin:.2g} apart)" if math.isfinite(margin) else ")"
    rule = llm.speculative_config.acceptance
    if rule != "coupled" and params.temperature > 0:
        line += f"; acceptance={rule} does not promise the same tokens, only 'coupled' does"
    return line
