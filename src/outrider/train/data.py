"""Samples: texts as the target's own tokens, and which of them a drafter is to learn to guess."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.core.errors import UsageError
from outrider.train.records import BadLine, Conversation, Line, Message, Record, Text

if TYPE_CHECKING:
    from outrider.models.loader import Model
    from outrider.models.tokenizer import Tokenizer

DEFAULT_LENGTH = 2048
LEAST_LENGTH = 8
"""Tokens below which a text teaches nothing: a drafter needs some positions to look ahead over."""


@dataclass(frozen=True)
class Sample:
    """One text. tokens: ids, with the template's control tokens.

    loss_from: spans [start, end) of positions whose tokens a drafter learns to guess: what the assistant wrote, with
    the token that ends the turn; all but the first for plain text. Ascending, not empty.
    """

    tokens: Sequence[int]
    loss_from: Sequence[tuple[int, int]]

    @property
    def learned(self) -> int:
        """Number of positions in the spans."""
        return sum(end - start for start, end in self.loss_from)


@dataclass
class Samples:
    """What came of some data. bad: what could not be used, in order."""

    samples: list[Sample] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)


class SampleMaker:
    """Records to samples of at most `max_length` tokens, through one model's tokenizer and chat template."""

    def __init__(self, model: Model, max_length: int | None = None) -> None:
        """max_length: None for DEFAULT_LENGTH, or the model's own if that is less.

        Raises UsageError for a model without a tokenizer, or if ``max_length`` is too small or beyond the model.
        """
        if model.tokenizer is None:
            raise UsageError(f"model {model.name!r} has no tokenizer, so it cannot be trained for on texts")
        if max_length is None:
            max_length = min(DEFAULT_LENGTH, model.config.max_position)
        if not LEAST_LENGTH <= max_length <= model.config.max_position:
            raise UsageError(
                f"max_length={max_length} must be from {LEAST_LENGTH} to the model's {model.config.max_position} tokens"
            )
        self._tokenizer: Tokenizer = model.tokenizer
        self._ends = frozenset(model.config.eos_token_ids)
        self.max_length = max_length

    def make(self, record: Record) -> list[Sample]:
        """The samples of one record: a conversation is cut to the length, a plain text makes as many as it takes.

        Raises UsageError, saying why, for a record with nothing to learn from.
        """
        samples = [self._conversation(record)] if isinstance(record, Conversation) else list(self._pieces(record))
        samples = [sample for sample in samples if sample.learned]
        if not samples:
            raise UsageError(f"nothing to learn from within {self.max_length} tokens")
        return samples

    def _pieces(self, record: Text) -> Iterator[Sample]:
        tokens = self._tokenizer.encode(record.text)
        for start in range(0, len(tokens), self.max_length):
            piece = array("i", tokens[start : start + self.max_length])
            if len(piece) >= LEAST_LENGTH:
                yield Sample(piece, [(1, len(piece))])

    def _conversation(self, record: Conversation) -> Sample:
        if record.unanswered:
            raise UsageError("there is no answer in it")
        tokens = array("i")
        spans: list[tuple[int, int]] = []
        last = len(record.messages) - 1
        rendered = ""
        for place, message in enumerate(record.messages):
            if message["role"] != "assistant":
                continue
            before, after = self._around(record.messages[: place + 1])
            if not before.startswith(rendered):
                raise UsageError("the chat template changes what was said before with each turn")
            tokens.extend(self._encode(before[len(rendered) :]))
            answer = self._encode(after[len(before) :])
            end = self._answer_end(answer)
            if place == last and not record.complete:
                answer = answer[: end - 1]  # the template ends the turn, which the author never did
                end = len(answer)
            spans.append((len(tokens), len(tokens) + end))
            tokens.extend(answer)
            rendered = after
            if len(tokens) >= self.max_length:
                break
        return self._cut(tokens, spans)

    def _around(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The text that the model sees before it writes the last message, and the text once it has."""
        before = self._tokenizer.render_chat(messages[:-1], add_generation_prompt=True)
        after = self._tokenizer.render_chat(messages, add_generation_prompt=False)
        if not after.startswith(before):
            raise UsageError("the chat template does not put an answer where it asks for one")
        return before, after

    def _encode(self, text: str) -> list[int]:
        # Piece by piece, as the tokens come about when the model answers: it reads the prompt, and writes what follows.
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _answer_end(self, answer: Sequence[int]) -> int:
        """How many tokens the model writes itself: what a template adds behind the end of a turn is not its own."""
        ends = (place for place in range(len(answer) - 1, -1, -1) if answer[place] in self._ends)
        return next(ends, len(answer) - 1) + 1

    def _cut(self, tokens: array[int], spans: Iterable[tuple[int, int]]) -> Sample:
        tokens = tokens[: self.max_length]
        inside = [(start, min(end, len(tokens))) for start, end in spans if start < len(tokens)]
        return Sample(tokens, [(start, end) for start, end in inside if start < end])


def make_samples(lines: Iterable[Line | BadLine], maker: SampleMaker, max_tokens: int | None = None) -> Samples:
    """The samples of some lines, in order, until there are ``max_tokens`` tokens or more; None: all.

    Lines of which nothing comes are among the bad ones, conversations without an answer as well.
    """
    found = Samples()
    tokens = 0
    for line in lines:
        if max_tokens is not None and tokens >= max_tokens:
            break
        if isinstance(line, BadLine):
            found.bad.append(line)
            continue
        try:
            made = maker.make(line.record)
        except UsageError as error:
            found.bad.append(line.bad(str(error)))
            continue
        found.samples += made
        tokens += sum(len(sample.tokens) for sample in made)
    return found


def check_usable(found: Samples) -> None:
    """Raise UsageError, with the first reasons, if there is not one sample."""
    if not found.samples:
        reasons = "; ".join(map(str, found.bad[:3])) or "there is not one line"
        raise UsageError(f"the data holds nothing to learn from ({reasons})")
