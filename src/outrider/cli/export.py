"""``outrider export``: a drafter in the form in which another engine takes it."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from outrider.cli.options import DEFAULT_MODEL
from outrider.core.errors import UsageError
from outrider.heads.handover import ENGINES

_TOKENS = 4
_ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE"}
"""SGLang's names of methods."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "head", metavar="DRAFTER", help="a folder or file, a hub id, or a method of which the model has a trained one"
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"the model that it drafts for (default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--for", dest="engine", required=True, choices=tuple(ENGINES), help="who is to run it")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where its files go")


def run(args: argparse.Namespace) -> int:
    """Write the drafter, and say how it is used; returns the exit code."""
    from outrider.heads.handover import for_engine
    from outrider.heads.load import load_head, locate_head
    from outrider.heads.save import save_head
    from outrider.heads.shipped import heads_at_hand
    from outrider.models.loader import load_model

    target = load_model(args.model)
    path = heads_at_hand(target).get(args.head) or locate_head(args.head)
    if args.out.exists() and args.out.resolve() == path.resolve():
        raise UsageError(f"--out {args.out} is where the drafter lies; give another folder")
    head, layout = for_engine(load_head(path, target.config, target.name), target.weights, args.engine)
    try:
        save_head(head, args.out, layout)
    except OSError as error:
        raise UsageError(f"cannot write to {args.out}: {error.strerror}") from None
    print(f"{head.method} drafter for {target.name}, for {args.engine}: {args.out}")
    if args.engine in _COMMANDS:
        print(shlex.join(_COMMANDS[args.engine](head.method, str(args.out))))
    return 0


def _vllm(method: str, folder: str) -> list[str]:
    config = {"method": method, "model": folder, "num_speculative_tokens": _TOKENS}
    return ["vllm", "serve", "TARGET", "--speculative-config", json.dumps(config)]


def _sglang(method: str, folder: str) -> list[str]:
    drafter = ["--speculative-algorithm", _ALGORITHMS[method], "--speculative-draft-model-path", folder]
    return ["python", "-m", "sglang.launch_server", "--model-path", "TARGET", *drafter]


_COMMANDS = {"vllm": _vllm, "sglang": _sglang}
"""How each engine is started with the drafter."""
