"""``outrider generate``: answer one prompt."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outrider.cli.options import add_model, add_sampling, add_structured, model_name, open_llm, sampling, structured
from outrider.cli.question import Question, add_question, question
from outrider.cli.speculation import add_speculation, speculation
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import RequestOutput

EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_question(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run with and without speculation, show what it saved, and check that the output is identical",
    )
    parser.add_argument("--show-drafts", action="store_true", help="colour accepted draft tokens (on a terminal)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    add_model(parser, positional=False)
    add_sampling(parser)
    add_structured(parser)
    add_speculation(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt; returns the exit code."""
    asked = question(args)
    params = sampling(args, structured_outputs=structured(args))
    config = speculation(args)
    if args.json and args.show_drafts:
        raise ConfigError("--json prints no text to colour with --show-drafts; drop one")
    if params.logprobs is not None and not args.json:
        raise ConfigError("--logprobs needs --json: they are not part of the text")
    if args.compare and config.members == ("none",):
        raise ConfigError("--compare needs a drafter to compare with plain decoding, and 'none' is plain decoding")
    llm = open_llm(args, config)
    if args.compare:
        from outrider.cli.compare import compare

        return compare(llm, asked, params, args)
    if args.json:
        output = asked.answer(llm, params)
        print(json.dumps({"model": model_name(args), **output_record(output)}, ensure_ascii=False))
        return EXIT_INTERRUPTED if output.finish_reason == "aborted" else 0
    return _stream(llm, asked, params, args)


def _stream(llm: LLM, asked: Question, params: SamplingParams, args: argparse.Namespace) -> int:
    from outrider.cli.terminal import note, painter, stream_answer, summary_line, to_stdout

    answer = stream_answer(asked.stream(llm, params), to_stdout, painter(llm, params) if args.show_drafts else None)
    to_stdout("\n")
    if answer.output is not None:
        note(summary_line(answer.output))
        if params.temperature > 0 and params.seed is None:
            note(f"[seed {answer.output.seed}: with --seed it gives this text again]")
    return EXIT_INTERRUPTED if answer.interrupted else 0


def output_record(output: RequestOutput) -> dict[str, Any]:
    """An answer as plain values, for JSON."""
    from outrider.bench import measure

    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "lossy": output.lossy,
        "seconds": measure.seconds(output),
        "ttft": output.timing.ttft,
        "tokens_per_second": measure.tokens_per_second(output),
        "decode_tokens_per_second": measure.decode_tokens_per_second(output),
        "speculation": measure.statistics_record(output.statistics),
        "logprobs": None if output.logprobs is None else [asdict(entry) for entry in output.logprobs],
    }
