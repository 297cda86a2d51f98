"""``outrider chat``: a conversation in the terminal, or over a pipe, one turn a line."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.cli.options import add_model, add_sampling, model_name, open_llm, sampling
from outrider.cli.parser import nearest
from outrider.cli.speculation import add_speculation, speculation
from outrider.core.errors import ContextLengthError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine.llm import LLM

_DEFAULTS = {"max_tokens": 1024}
"""Where chat departs from `SamplingParams`: an answer ends when the model ends it, and rarely needs more than this."""

_HELP = """\
/help    this list
/reset   forget the conversation
/stats   what speculation did in this conversation
/drafts  colour accepted draft tokens, or stop colouring them
/quit    leave (as Ctrl-D does)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one. //text sends /text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, positional=True)
    parser.add_argument("--system", metavar="TEXT", help="system message, before the first turn")
    parser.add_argument("--show-drafts", action="store_true", help="colour accepted draft tokens (on a terminal)")
    add_sampling(parser, _DEFAULTS, leave_out=["logprobs"])
    add_speculation(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends; returns the exit code."""
    params = sampling(args, _DEFAULTS)
    llm = open_llm(args, speculation(args))
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # line editing and history for input(), where Python has it
            import readline  # noqa: F401
        from outrider.cli.terminal import note

        note(f"{model_name(args)}, speculation: {llm.speculative_config.method}. /help lists commands, Ctrl-D leaves.")
    Chat(llm, params, system=args.system, show_drafts=args.show_drafts, interactive=interactive).loop()
    return 0


class Chat:
    """One conversation. interactive: show prompts and statistics; otherwise only answers are printed, one a turn."""

    def __init__(
        self, llm: LLM, params: SamplingParams, *, system: str | None, show_drafts: bool, interactive: bool
    ) -> None:
        from outrider.cli.terminal import styler

        self._llm = llm
        self._params = params
        self._system = system
        self._show_drafts = show_drafts
        self._interactive = interactive
        self._style = styler(sys.stdout)
        self._commands: dict[str, Callable[[], object]] = {
            "/help": lambda: print(_HELP),
            "/reset": self._reset,
            "/stats": self._print_statistics,
            "/drafts": self._toggle_drafts,
            "/quit": lambda: None,
        }
        self._reset()

    def loop(self) -> None:
        """Read turns and answer them, until the input ends or ``/quit``."""
        while (said := self._read()) is not None:
            if not said.strip():
                continue
            if said.startswith("/") and not said.startswith("//"):
                word = said.strip()
                if word == "/quit":
                    return
                if word in self._commands:
                    self._commands[word]()
                else:
                    print(f"unknown command {word!r}{nearest(word, self._commands)}")
                continue
            self._say(said.removeprefix("/") if said.startswith("//") else said)

    def _read(self) -> str | None:
        """One turn of the user; None at the end of the input. Ctrl-C drops what was typed."""
        lines: list[str] = []
        while True:
            prompt = self._prompt("> " if not lines else ". ") if self._interactive else ""
            try:
                line = input(prompt)
            except EOFError:
                if self._interactive:
                    print()
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print()
                lines = []
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _prompt(self, text: str) -> str:
        """The prompt in bold, its escape sequences marked so that readline does not count them as width."""
        styled = self._style(text, "bold")
        return re.sub(r"(\x1b\[\d+m)", "\x01\\1\x02", styled) if "readline" in sys.modules else styled

    def _say(self, text: str) -> None:
        from outrider.cli.terminal import note, painter, stream_answer, summary_line, to_stdout

        self._messages.append({"role": "user", "content": text})
        paint = painter(self._llm, self._params) if self._show_drafts else None
        try:
            deltas = self._llm.stream_chat(self._messages, self._params)
        except ContextLengthError as error:
            self._messages.pop()
            note(f"{error} (/reset forgets the conversation)")
            return
        answer = stream_answer(deltas, to_stdout, paint)
        to_stdout("\n")
        self._messages.append({"role": "assistant", "content": answer.text})
        if answer.output is not None:
            self._statistics.append(answer.output.statistics)
            if self._interactive:
                note(summary_line(answer.output))
        if answer.interrupted and not self._interactive:
            raise KeyboardInterrupt

    def _reset(self) -> None:
        from outrider.engine.outputs import SpeculationStats

        self._messages = [{"role": "system", "content": self._system}] if self._system else []
        self._statistics: list[SpeculationStats] = []

    def _toggle_drafts(self) -> None:
        self._show_drafts = not self._show_drafts
        print(f"accepted draft tokens are {'coloured' if self._show_drafts else 'not coloured'} from here on")

    def _print_statistics(self) -> None:
        from outrider.bench.table import format_table
        from outrider.engine.outputs import SpeculationStats

        total = SpeculationStats.total(self._statistics)
        rows = [
            ["answers", str(len(self._statistics))],
            ["tokens", str(total.committed)],
            ["rounds", str(total.rounds)],
            ["draft tokens verified", str(total.drafted)],
            ["acceptance rate", f"{total.acceptance_rate:.1%}"],
            ["mean acceptance length", f"{total.mean_acceptance_length:.2f}"],
            *([f"time in {part}", f"{getattr(total, f'{part}_seconds'):.2f} s"] for part in _PARTS),
        ]
        print(format_table([], rows))


_PARTS = ("draft", "verify", "accept", "engine")
