"""Options that several commands share: the model, the engine's sizes and sampling."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.parser import add_fields, given
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.errors import UsageError
from outrider.core.sampling import SamplingParams
from outrider.core.structured import StructuredOutputs

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.models.config import ModelConfig

DEFAULT_MODEL = "smollm2-135m"

_MODEL_HELP = f"an alias (see 'outrider models'), a local file or folder, or a hub id (default: {DEFAULT_MODEL})"


def add_model(parser: argparse.ArgumentParser, *, positional: bool, engine: bool = True) -> None:
    """Add the model, where it runs and the engine's sizes. positional: the model may also be given without a flag.

    engine: whether the engine's sizes are the user's to choose.
    """
    if positional:
        parser.add_argument("model_argument", metavar="MODEL", nargs="?", help=_MODEL_HELP)
    group = parser.add_argument_group("model and executor")
    group.add_argument("-m", "--model", metavar="MODEL", help="the same, as an option" if positional else _MODEL_HELP)
    group.add_argument(
        "--executor",
        metavar="NAME",
        default="auto",
        help="what runs the model: native (kernels for CPUs), torch, or auto: native where it can run (default)",
    )
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    group.add_argument("--device", default="cpu", help="a PyTorch device, such as cpu or cuda (default: cpu)")
    group.add_argument("--quantization", metavar="KIND", help="quantise float weights at load: int8 or int4 (native)")
    group.add_argument("--threads", type=int, metavar="N", help="threads of the executor (default: one per core)")
    if engine:
        add_fields(group, EngineConfig, "engine")


def add_sampling(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None, *, leave_out: Sequence[str] = ()
) -> None:
    """Add an option for every sampling parameter. defaults: where the command departs from `SamplingParams`.

    leave_out: parameters that would have no effect on what the command shows.
    """
    group = parser.add_argument_group("sampling")
    add_fields(group, SamplingParams, "sampling", defaults=defaults, leave_out=[*leave_out, "structured_outputs"])


def add_structured(parser: argparse.ArgumentParser) -> None:
    """Add the options that constrain the output."""
    options = parser.add_argument_group("structured output", "what the output must look like; at most one of these")
    group = options.add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", type=Path, help="JSON that fits the schema in this file")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", metavar="REGEX", help="text that this regular expression matches as a whole")
    group.add_argument("--grammar", metavar="FILE", type=Path, help="text of the GBNF grammar in this file")
    group.add_argument("--choice", metavar="TEXT", action="append", help="this text, or another --choice")


def structured(args: argparse.Namespace) -> StructuredOutputs | None:
    """The constraint that the options ask for, if any. Raises UsageError, SamplingParamsError."""
    schema, grammar = (None if file is None else _read(file) for file in (args.json_schema, args.grammar))
    if schema is None and grammar is None and args.regex is None and args.choice is None and not args.json_object:
        return None
    return StructuredOutputs(
        json=schema, json_object=args.json_object, regex=args.regex, grammar=grammar, choice=args.choice
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


def sampling(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None, **more: Any) -> SamplingParams:
    """The sampling parameters that the options ask for, and ``more`` of them. Raises SamplingParamsError."""
    return SamplingParams(**{**(defaults or {}), **given(args, "sampling"), **more})


def model_name(args: argparse.Namespace) -> str:
    """The model that was asked for; UsageError if it was named twice."""
    positional: str | None = getattr(args, "model_argument", None)
    option: str | None = args.model
    if positional and option and positional != option:
        raise UsageError(f"two models were named, {positional!r} and --model {option!r}; drop one")
    return positional or option or DEFAULT_MODEL


def open_llm(
    args: argparse.Namespace,
    speculative_config: SpeculativeConfig,
    sizes: Callable[[ModelConfig], EngineConfig] | None = None,
    reserve_for: Sequence[SpeculativeConfig] = (),
) -> LLM:
    """Load the model. What can be refused without PyTorch, whose import takes seconds, is refused before.

    sizes: the engine's, by the model, where they are not the user's to choose. reserve_for: see `LLM`.
    """
    from outrider.executors import check_executor
    from outrider.models.loader import load_model

    check_executor(args.executor)
    engine_config = EngineConfig(**given(args, "engine"))
    model = load_model(model_name(args), progress=sys.stderr.isatty())
    if sizes is not None:
        engine_config = sizes(model.config)
    from outrider.engine.llm import LLM

    llm = LLM(
        model,
        speculative_config,
        executor=args.executor,
        dtype=args.dtype,
        device=args.device,
        quantization=args.quantization,
        threads=args.threads,
        engine_config=engine_config,
        reserve_for=reserve_for,
    )
    if llm.quantization_error is not None:
        from outrider.cli.terminal import note

        note(str(llm.quantization_error))
    return llm
