"""The ``outrider`` command. Each command's module is imported when it is the one that was asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from outrider import __version__
from outrider.cli.parser import Parser
from outrider.core.errors import OutriderError, UsageError

COMMANDS = {
    "generate": ("[OPTIONS] [PROMPT]", "answer one prompt, or compare with and without speculation"),
    "chat": ("[OPTIONS] [MODEL]", "talk to a model in the terminal"),
    "models": ("[OPTIONS] [fetch NAME]", "list the models that have a short name, and fetch them"),
    "serve": ("[OPTIONS] [MODEL]", "serve a model over HTTP, as OpenAI's API does"),
    "bench": ("[OPTIONS] [MODEL]", "measure methods against plain decoding, prompt by prompt"),
    "export": ("--for ENGINE --out DIR DRAFTER [MODEL]", "write a drafter as vLLM or SGLang takes it"),
    "train": ("[OPTIONS] --method METHOD --out DIR [MODEL]", "train a drafter for a model, with data or without"),
}
"""Name -> usage and help. The command's module has its name, and holds ``add_arguments(parser)`` and ``run(args)``."""

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def build_parser(command: str | None = None) -> Parser:
    """The parser of the command line, with the arguments of one command only; the others are merely listed.

    What it returns for a parsed command has ``run``, and ``parser``, by which its arguments were parsed.
    """
    parser = Parser(prog="outrider", description="Speculative decoding that can be seen in the clock and nowhere else.")
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    commands: Any = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, (usage, text) in COMMANDS.items():
        description = text[0].upper() + text[1:] + "."
        own = commands.add_parser(name, help=text, description=description, usage=f"outrider {name} {usage}")
        if name == command:
            module = importlib.import_module(f"outrider.cli.{name}")
            module.add_arguments(own)
            own.set_defaults(run=module.run, parser=own)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0; 1 for a failure; 2 for bad usage; 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a model may write what the terminal's encoding cannot
    try:
        args = build_parser(words[0] if words else None).parse(words)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has left. Python would complain once more when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
