"""``outrider train``: a drafter for a model, from data, from what the model says by itself, or from both."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.options import add_model, model_name, open_llm
from outrider.cli.parser import add_fields, given
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.heads.head import Head
    from outrider.models.config import ModelConfig
    from outrider.train.config import TrainConfig
    from outrider.train.curves import Curves
    from outrider.train.data import Sample, Samples
    from outrider.train.data_config import DataConfig
    from outrider.train.identity import Origin
    from outrider.train.modules.base import DrafterModule
    from outrider.train.modules.shape import Shape

STATES = "states"
BAD_LINES = "bad-lines.txt"
_SHOWN = 5
"""Bad lines that are named on the terminal; all of them are in BAD_LINES."""

_ROOM = 768
"""Tokens of KV cache for each conversation that is being written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from outrider.train.config import TrainConfig
    from outrider.train.data_config import DataConfig
    from outrider.train.modules import MODULES
    from outrider.train.modules.shape import Shape

    parser.add_argument("--method", required=True, choices=MODULES.names(), help="what kind of drafter")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the drafter, and all else, goes")
    parser.add_argument(
        "--init-from", metavar="DIR", type=Path, help="go on from this drafter, for a tuned target or another domain"
    )
    parser.add_argument(
        "--restart", action="store_true", help="train anew, from the data in DIR; default: go on from its checkpoint"
    )
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="JSON lines: conversations, questions (which the target answers) or texts; may be given again",
    )
    add_fields(group, DataConfig, "data")
    add_fields(parser.add_argument_group("training"), TrainConfig, "train")
    add_fields(parser.add_argument_group("drafter", "size of a new one"), Shape, "shape")
    add_model(parser, positional=True, engine=False)


def run(args: argparse.Namespace) -> int:
    """Prepare the data, train, and say what came of it; returns 0, or 128 + the number of the signal that ended it."""
    from outrider.train.config import TrainConfig
    from outrider.train.data_config import DataConfig
    from outrider.train.modules.shape import Shape

    data = DataConfig(**given(args, "data"))
    config, shape = TrainConfig(**given(args, "train")), Shape(**given(args, "shape"))
    _check(args, data, shape)
    llm = open_llm(args, SpeculativeConfig(method="none"), lambda model: _sizes(model, data))
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    from outrider.cli.terminal import note
    from outrider.train.prepare import prepare
    from outrider.train.stop import TrainingStoppedError

    found = prepare(llm, args.data, data, args.out, seed=config.seed, bar=_bar, held_out=config.held_out)
    _tell_of_data(found, args.out)
    head = _given_head(args, llm)
    module = _module(args, llm, head, shape, found.samples, config)
    try:
        curves = _train(args, llm, module, found, config, data, _origin(args, llm, head))
    except TrainingStoppedError as stopped:
        note(str(stopped))
        return 128 + stopped.number
    _tell_of_result(args, module, curves)
    return 0


def _check(args: argparse.Namespace, data: DataConfig, shape: Shape) -> None:
    """What can be refused before a model is loaded."""
    shape.check_is_read(args.method)
    if not args.data and not data.self_synthesize:
        raise UsageError("there is nothing to train on: give --data FILE, --self-synthesize N, or both")
    for file in args.data:
        if not file.is_file():
            raise UsageError(f"cannot read the data in {file}: there is no such file")
    if args.init_from is not None:
        from outrider.heads.load import head_method

        if (method := head_method(args.init_from)) != args.method:
            raise ConfigError(f"{args.init_from} is a drafter of method {method!r}; give --method {method}")
        for option in fields(shape):
            if getattr(shape, option.name) != option.default:
                raise ConfigError(f"{option.name} is for a new drafter; {args.init_from} has a size already")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {args.out}: {error.strerror}") from None


def _sizes(model: ModelConfig, data: DataConfig) -> EngineConfig:
    """A context for the longest text, and KV for all conversations that are being written."""
    from outrider.train.data import DEFAULT_LENGTH

    context = min(data.max_length or DEFAULT_LENGTH, model.max_position)
    return EngineConfig(
        max_batch_size=data.writers,
        max_context=context,
        kv_tokens=max(2 * context, data.writers * min(context, _ROOM)),
    )


def _given_head(args: argparse.Namespace, llm: LLM) -> Head | None:
    from outrider.heads.load import load_head

    return None if args.init_from is None else load_head(args.init_from, llm.model.config, model_name(args))


def _module(
    args: argparse.Namespace, llm: LLM, head: Head | None, shape: Shape, samples: list[Sample], config: TrainConfig
) -> DrafterModule:
    from outrider.train.modules.build import module_from_head, new_module
    from outrider.train.modules.target import Target

    target = Target.load(llm.model)
    if head is not None:
        return module_from_head(head, target)
    return new_module(args.method, target, shape, samples, seed=config.seed)


def _origin(args: argparse.Namespace, llm: LLM, head: Head | None) -> Origin:
    from outrider.train.identity import Origin, head_digest, target_digest

    numbers = [args.quantization, None if args.dtype == "auto" else args.dtype]
    target = " ".join(filter(None, [target_digest(llm.model), llm.executor_name, *numbers]))
    return Origin(target) if head is None else Origin(target, head_digest(head))


def _train(
    args: argparse.Namespace,
    llm: LLM,
    module: DrafterModule,
    found: Samples,
    config: TrainConfig,
    data: DataConfig,
    origin: Origin,
) -> Curves:
    from outrider.train.features import FeatureStore
    from outrider.train.loop import check_resumable, train

    if not args.restart:
        check_resumable(args.out, found.samples, module, config, origin)
    store = FeatureStore(
        found.samples,
        sorted({*module.feature_layers, module.last_layer}),
        llm.executor,
        args.out / STATES,
        disk_budget=data.disk_bytes,
        target=origin.target,
    )
    size = [len(sample.tokens) for sample in found.samples]
    with _bar("hidden states", sum(size[: store.cacheable]), "token", sum(size[: store.cached])) as step:
        store.fill(step)
    if store.cached < len(store):
        from outrider.cli.terminal import note

        left = sum(size[store.cached :])
        note(f"hidden states of {left} tokens are over the disk budget, and are computed again in every epoch")
    try:
        shown = sys.stderr.isatty()
        return train(store, module, config, args.out, origin=origin, resume=not args.restart, show_progress=shown)
    finally:
        store.close()


def _tell_of_data(found: Samples, folder: Path) -> None:
    from outrider.cli.terminal import note
    from outrider.models.cache import write_atomically
    from outrider.train.curves import can_draw

    file = folder / BAD_LINES
    file.unlink(missing_ok=True)
    if found.bad:
        write_atomically(file, "".join(f"{bad}\n" for bad in found.bad).encode())
        note(f"{len(found.bad)} {'line' if len(found.bad) == 1 else 'lines'} of the data cannot be used:")
        for bad in found.bad[:_SHOWN]:
            note(f"  {bad}")
        left = len(found.bad) - _SHOWN
        note(f"  and {left} more; all of them are in {file}" if left > 0 else f"  (also in {file})")
    learned = sum(sample.learned for sample in found.samples)
    note(f"{len(found.samples)} texts of {found.tokens} tokens together, {learned} of them to be learned")
    if not can_draw():
        note("the curves will not be drawn: that takes matplotlib (pip install 'outrider[plot]')")


def _tell_of_result(args: argparse.Namespace, module: DrafterModule, curves: Curves) -> None:
    from outrider.train.curves import can_draw

    last = (curves.held_out or curves.train)[-1]
    hits = ", ".join(f"{value:.1%}" for value in last["accuracy"])
    where = "texts held out" if curves.held_out else "the texts it was trained on"
    print(f"{module.method} drafter for {model_name(args)}: {args.out}")
    print(f"accuracy by draft position, on {where}: {hits}")
    print(f"estimated acceptance length of a chain: {last['acceptance_length']:.2f}")
    print(f"loss by update: {args.out / ('curves.png' if can_draw() else 'curves.json')}")


@contextmanager
def _bar(what: str, total: int, unit: str, done: int = 0) -> Iterator[Callable[[int], Any]]:
    """A progress bar on a terminal; elsewhere one line at the end of each part of the work, with its speed."""
    from tqdm import tqdm

    from outrider.cli.terminal import note

    start = time.perf_counter()
    with tqdm(total=total, initial=done, unit=unit, desc=what, disable=not sys.stderr.isatty(), smoothing=0.05) as bar:
        counted = 0

        def step(count: int) -> None:
            nonlocal counted
            counted += count
            bar.update(count)

        yield step
    seconds = time.perf_counter() - start
    if not sys.stderr.isatty() and counted:
        note(f"{what}: {counted} {unit}s in {seconds:.1f} s, {counted / seconds:.1f} a second")
