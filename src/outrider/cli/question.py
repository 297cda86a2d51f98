"""The prompt of ``outrider generate``, and the ways of putting it to a model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Generator

    from outrider.core.sampling import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Delta, RequestOutput


@dataclass(frozen=True)
class Question:
    """One prompt. raw: to be continued as it is; otherwise it is the user's turn of a chat, after ``system``."""

    text: str
    system: str | None = None
    raw: bool = False

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.text}]

    def answer(self, llm: LLM, params: SamplingParams) -> RequestOutput:
        """The whole answer at once; Ctrl-C ends it early, finish reason "aborted"."""
        if self.raw:
            return llm.generate(self.text, params, use_tqdm=False)[0].raise_for_error()
        return llm.chat(self.messages, params, use_tqdm=False)[0].raise_for_error()

    def stream(self, llm: LLM, params: SamplingParams) -> Generator[Delta]:
        """The answer piece by piece."""
        return llm.stream(self.text, params) if self.raw else llm.stream_chat(self.messages, params)


def add_question(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="what to answer; - reads standard input")
    parser.add_argument("--prompt-file", metavar="FILE", type=Path, help="read the prompt from a file")
    parser.add_argument("--system", metavar="TEXT", help="system message, before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")


def question(args: argparse.Namespace) -> Question:
    """The prompt that the options give. Raises UsageError if there is none, or more than one."""
    if args.raw and args.system:
        raise UsageError("--raw leaves no place for a --system message; drop one")
    if args.prompt is not None and args.prompt_file is not None:
        raise UsageError("the prompt is given twice, as an argument and with --prompt-file; drop one")
    return Question(_text(args), args.system, args.raw)


def _text(args: argparse.Namespace) -> str:
    try:
        if args.prompt_file is not None:
            return str(args.prompt_file.read_text(encoding="utf-8"))
        if args.prompt == "-":
            return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt is not UTF-8 text: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {args.prompt_file}: {error.strerror}") from None
    if args.prompt is None:
        raise UsageError("no prompt: give it as an argument, with --prompt-file FILE, or as - for standard input")
    return str(args.prompt)
