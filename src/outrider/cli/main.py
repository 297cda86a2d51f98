"""The ``outrider`` command. Importing it, and ``outrider --help``, import nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from outrider import __version__
from outrider.cli import bench, chat, generate, models
from outrider.cli.parser import Parser
from outrider.core.errors import OutriderError, UsageError

_COMMANDS = {
    "generate": (generate, "[OPTIONS] [PROMPT]", "answer one prompt, or compare with and without speculation"),
    "chat": (chat, "[OPTIONS] [MODEL]", "talk to a model in the terminal"),
    "models": (models, "[OPTIONS] [fetch NAME]", "list the models that have a short name, and fetch them"),
    "bench": (bench, "[OPTIONS] [MODEL]", "measure methods against plain decoding, prompt by prompt"),
}

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def build_parser() -> Parser:
    """The parser of the whole command line; a parsed command has ``run``, and the ``parser`` it was parsed by."""
    parser = Parser(prog="outrider", description="Speculative decoding that can be seen in the clock and nowhere else.")
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    commands: Any = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, (module, usage, text) in _COMMANDS.items():
        description = text[0].upper() + text[1:] + "."
        command = commands.add_parser(name, help=text, description=description, usage=f"outrider {name} {usage}")
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0; 1 for a failure; 2 for bad usage; 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may write what the terminal's encoding cannot
    args = build_parser().parse(argv)
    try:
        return _run(args)
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has left. Python would complain once more when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _run(args: argparse.Namespace) -> int:
    code: int = args.run(args)
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
