"""From what the user has to samples: read the files, have the target write what is missing, and tokenise all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outrider.core.errors import ConfigError
from outrider.train.data import SampleMaker, Samples, check_usable, make_samples
from outrider.train.data_config import DataConfig
from outrider.train.identity import target_digest
from outrider.train.journal import Journal
from outrider.train.order import with_questions
from outrider.train.records import BadLine, Conversation, Line, read_lines
from outrider.train.synthesis import Author, answer_plans, own_plans, synthesize

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

ANSWERS = "answers.jsonl"
OWN = "synthesis.jsonl"


class Bar(Protocol):
    """Shows a part of the work. What it gives is called with each piece of ``unit``, ``total`` of them in the end."""

    def __call__(
        self, what: str, total: int, unit: str, done: int = 0
    ) -> AbstractContextManager[Callable[[int], Any]]: ...


def prepare(
    llm: LLM,
    files: Sequence[Path],
    config: DataConfig,
    folder: Path,
    *,
    seed: int,
    bar: Bar,
    held_out: float = 0.0,
) -> Samples:
    """The samples of ``files`` and of what the target writes, which is kept in ``folder``, and gone on with there.

    Conversations without an answer are answered by the target. The same files, configuration, seed and target give the
    same samples. held_out: the part that will not be trained on.

    Raises UsageError if a file cannot be read or if nothing comes of all this, ConfigError for options without effect,
    DiskFullError, or OutriderError if the target writes nothing of use.
    """
    maker = SampleMaker(llm.model, config.max_length)
    given, asked = _divided(chain.from_iterable(map(read_lines, files)), config.regenerate)
    own = config.self_synthesize
    config.check_is_read([*(["answers"] if asked or own else []), *(["questions"] if own else [])])
    if config.regenerate and not asked:
        raise ConfigError("regenerate is for conversations, and there are none in the data")
    author = Author(llm, config.settings(seed), config.writers)
    made_with = {**asdict(config.settings(seed)), "target": target_digest(llm.model)}
    parts: list[Iterable[Line | BadLine]] = [given]
    if asked:
        plans = answer_plans(asked)
        questions = hashlib.sha256(repr(plans).encode()).hexdigest()
        with (
            Journal(folder / ANSWERS, {**made_with, "questions": questions}) as journal,
            bar("answers", len(plans), "conversation", journal.next) as step,
        ):
            synthesize(author, iter(plans[journal.next :]), journal, progress=lambda kept: step(1))
        parts.append(read_lines(folder / ANSWERS))
    if own:
        with Journal(folder / OWN, made_with) as journal, bar("synthesis", own, "conversation", journal.kept) as step:
            synthesize(author, own_plans(journal.next), journal, own, lambda kept: step(int(kept)))
        parts.append(islice(read_lines(folder / OWN), own))
    found = make_samples(chain.from_iterable(parts), maker, config.max_tokens)
    check_usable(found)
    if config.learn_questions:
        found.samples = with_questions(found.samples, held_out)
    return found


def _divided(lines: Iterable[Line | BadLine], regenerate: bool) -> tuple[list[Line | BadLine], list[Conversation]]:
    """What can be learned from as it is, and the conversations that the target is to answer.

    Where a tool speaks, the questions depend on the answers: such a conversation stays as it is.
    """
    given: list[Line | BadLine] = []
    asked: list[Conversation] = []
    for line in lines:
        record = None if isinstance(line, BadLine) else line.record
        if isinstance(record, Conversation) and (record.unanswered or regenerate) and not record.uses_tools:
            asked.append(record)
        else:
            given.append(line)
    return given, asked
