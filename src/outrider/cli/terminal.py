"""What the terminal shows: colours where they are wanted, notes, and answers as they come."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from outrider.bench.measure import tokens_per_second

if TYPE_CHECKING:
    from collections.abc import Generator

    from outrider.core.sampling import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Delta, RequestOutput
    from outrider.models.tokenizer import Tokenizer

_STYLES = {"accepted": "32", "dim": "2", "bold": "1", "error": "31"}

Style = Callable[[str, str], str]
"""(text, style name) -> text, coloured or not."""


def styler(stream: TextIO) -> Style:
    """Colours for a terminal; plain text for a pipe, a dumb terminal, or where NO_COLOR is set."""
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        return lambda text, style: f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if text else ""
    return lambda text, style: text


def note(message: str) -> None:
    """One line on standard error, dim on a terminal."""
    print(styler(sys.stderr)(message, "dim"), file=sys.stderr, flush=True)


class DraftPainter:
    """Splits the text of a streamed answer at its tokens, so that accepted draft tokens can be coloured.

    A piece's text is shorter than its tokens' while a stop string or an unfinished character is pending; what is left
    over waits for the next piece.
    """

    def __init__(self, tokenizer: Tokenizer, style: Style, *, skip_special_tokens: bool) -> None:
        self._decoder = tokenizer.stream(skip_special_tokens)
        self._style = style
        self._pending: list[tuple[str, bool]] = []

    def __call__(self, delta: Delta) -> str:
        """The piece's text, with colours."""
        for token, drafted in zip(delta.token_ids, delta.drafted, strict=True):
            self._pending.append((self._decoder.push(token), drafted))
        painted, left = [], len(delta.text)
        while self._pending and left > 0:
            text, drafted = self._pending.pop(0)
            if len(text) > left:
                self._pending.insert(0, (text[left:], drafted))
                text = text[:left]
            left -= len(text)
            painted.append(self._style(text, "accepted") if drafted else text)
        # What the decoder still held when the answer ended: the replacement character of a broken sequence.
        return "".join(painted) + delta.text[len(delta.text) - left :]


@dataclass(frozen=True)
class Answer:
    """A streamed answer. output: None if Ctrl-C came at a moment when the engine could not give it."""

    text: str
    output: RequestOutput | None

    @property
    def interrupted(self) -> bool:
        return self.output is None or self.output.finish_reason == "aborted"


def stream_answer(
    deltas: Generator[Delta], write: Callable[[str], None], paint: Callable[[Delta], str] | None = None
) -> Answer:
    """Write an answer piece by piece until it ends, or until Ctrl-C; what was committed is kept.

    Raises OutriderError if the model could not go on.
    """
    text: list[str] = []
    output: RequestOutput | None = None
    with closing(deltas):
        try:
            for delta in deltas:
                text.append(delta.text)
                output = delta.output
                write(paint(delta) if paint else delta.text)
        except KeyboardInterrupt:
            # It came between two pieces; the stream still gives the last one. It has ended if it came in its midst.
            with suppress(KeyboardInterrupt, StopIteration):
                output = deltas.throw(KeyboardInterrupt()).output
    return Answer("".join(text), output.raise_for_error() if output else None)


def to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def summary_line(output: RequestOutput) -> str:
    """One line about an answer: length, speed, and what speculation did."""
    stats = output.statistics
    parts = [f"{len(output.token_ids)} tokens", f"{tokens_per_second(output):.1f} tokens/s"]
    if stats.drafted:
        parts.append(f"{stats.mean_acceptance_length:.2f} tokens a round")
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted} draft tokens accepted")
    if stats.failures:
        parts.append(f"the drafter failed in {stats.failures} rounds")
    if output.finish_reason == "length":
        parts.append("stopped at the length limit")
    if output.finish_reason == "aborted":
        parts.append("interrupted")
    if output.lossy:
        parts.append("lossy acceptance rule")
    return "[" + ", ".join(parts) + "]"


def painter(llm: LLM, params: SamplingParams) -> DraftPainter:
    """What colours the accepted draft tokens of one answer on standard output."""
    return DraftPainter(llm.tokenizer, styler(sys.stdout), skip_special_tokens=params.skip_special_tokens)
