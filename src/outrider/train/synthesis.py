"""Conversations that the target writes itself: the answers, and where nobody asks, the questions as well.

A question is what the model writes after its own chat template's user header (Magpie, Xu et al. 2024). A drafter has to
guess what this target says, so its own answers teach more than anybody else's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from outrider.core.errors import ContextLengthError, OutriderError, UsageError
from outrider.core.sampling import SamplingParams
from outrider.train.filters import REPEATS, ends_in_a_loop, fault
from outrider.train.journal import Journal
from outrider.train.records import Conversation, Message

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import RequestOutput
    from outrider.engine.request import Request

SECOND_TURN = 5
"""Every so many conversations that nobody asked for go on for a second turn."""

_QUESTION_TOP_P = 0.95
_MARK = "outrider-question"
_STRIDE = 64
"""Tokens after which a turn that is being written is looked at: one that runs in circles is not worth its end."""

_PATIENCE = 64
_WORST_YIELD = 0.1


@dataclass(frozen=True)
class SynthesisSettings:
    """How conversations are written. The same settings, plans and target give the same texts, whatever the batch.

    answer_tokens, question_tokens: longest turns. temperature: of the answers that are not greedy. greedy_share: share
    of conversations with greedy answers. question_temperature: of questions.
    """

    answer_tokens: int = 512
    question_tokens: int = 256
    temperature: float = 0.8
    greedy_share: float = 0.5
    question_temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """A conversation to be written. questions: None where the model asks. opening: what comes before, of the system."""

    number: int
    questions: tuple[str | None, ...]
    opening: tuple[Message, ...] = ()


@dataclass
class Written:
    """A conversation that is being written. dropped: why it is of no use. complete: its last answer came to an end."""

    plan: Plan
    temperature: float
    messages: list[Message] = field(default_factory=list)
    complete: bool = True
    dropped: str | None = None

    @property
    def asking(self) -> bool:
        """Whether the next turn to be written is a question."""
        return not self.messages or self.messages[-1]["role"] != "user"

    @property
    def ended(self) -> bool:
        answers = sum(message["role"] == "assistant" for message in self.messages)
        return self.dropped is not None or not self.complete or answers == len(self.plan.questions)


@dataclass
class _Turn:
    """A turn that the engine is at work on. checked: tokens of it that were looked at."""

    request: Request
    written: Written
    checked: int = 0

    def loops(self) -> bool:
        """Whether it runs in circles, at the places where that is looked at, however many tokens a round brings."""
        view = self.request.view
        start = view.num_prompt_tokens
        while len(view.tokens) - start >= self.checked + _STRIDE:
            self.checked += _STRIDE
            if ends_in_a_loop(view.tokens[start : start + self.checked]):
                return True
        return False


class Author:
    """Has a model write conversations, many at a time."""

    def __init__(self, llm: LLM, settings: SynthesisSettings, batch: int) -> None:
        self._llm = llm
        self._settings = settings
        self._batch = batch
        self._ends = frozenset(llm.model.config.eos_token_ids)

    def write(self, plans: Iterator[Plan]) -> Iterator[Written]:
        """The conversations, in the order of the plans. Plans are taken as there is room for them.

        Raises OutriderError if the model fails, UsageError if its chat template does not serve.
        """
        running: dict[int, _Turn] = {}
        order: list[Written] = []
        try:
            while True:
                while len(running) < self._batch and (plan := next(plans, None)) is not None:
                    written = Written(plan, self._temperature(plan), list(plan.opening))
                    order.append(written)
                    self._go_on(written, running)
                while order and order[0].ended:
                    yield order.pop(0)
                if not order:
                    return
                for request in self._llm.engine.step():
                    self._after_round(running[request.id], running)
        finally:
            for turn in running.values():
                self._llm.engine.abort(turn.request)

    def _after_round(self, turn: _Turn, running: dict[int, _Turn]) -> None:
        request, written = turn.request, turn.written
        if turn.loops():
            self._llm.engine.abort(request)
            written.dropped = REPEATS
        elif request.finished:
            self._take(written, request.result().raise_for_error())
        else:
            return
        del running[request.id]
        self._go_on(written, running)

    def _go_on(self, written: Written, running: dict[int, _Turn]) -> None:
        """Ask the engine for the next turn that the model has to write, unless there is none."""
        while not written.ended and written.asking:
            question = written.plan.questions[sum(message["role"] == "user" for message in written.messages)]
            if question is None:
                break
            written.messages.append({"role": "user", "content": question})
        if written.ended:
            return
        asking = written.asking
        try:
            prompt = self._question_prompt(written) if asking else self._llm.tokenizer.encode_chat(written.messages)
            request = self._llm.engine.add(prompt, self._params(written))
        except ContextLengthError:
            written.dropped = "too long"
            return
        running[request.id] = _Turn(request, written)

    def _take(self, written: Written, output: RequestOutput) -> None:
        """Put a turn that the model wrote where it belongs."""
        tokens = output.token_ids
        ended = output.finish_reason == "stop"
        text = output.text.strip()
        written.dropped = fault(tokens[:-1] if ended and tokens[-1] in self._ends else tokens, text)
        if written.asking:
            written.messages.append({"role": "user", "content": text})
            if not ended:
                written.dropped = "a question without an end"
        else:
            written.messages.append({"role": "assistant", "content": text})
            written.complete = ended

    def _question_prompt(self, written: Written) -> list[int]:
        """The conversation up to where its user would write: the template's text before a user's message."""
        asked = self._llm.tokenizer.render_chat(
            [*written.messages, {"role": "user", "content": _MARK}], add_generation_prompt=False
        )
        header, mark, _ = asked.partition(_MARK)
        if not mark:
            raise UsageError("the model's chat template leaves out what a user says; give --data with questions")
        return self._llm.tokenizer.encode(header, add_special_tokens=False)

    def _params(self, written: Written) -> SamplingParams:
        settings = self._settings
        seed = _number(settings.seed, written.plan.number, len(written.messages))
        if written.asking:
            return SamplingParams(
                temperature=settings.question_temperature,
                top_p=_QUESTION_TOP_P,
                max_tokens=settings.question_tokens,
                seed=seed,
            )
        return SamplingParams(temperature=written.temperature, max_tokens=settings.answer_tokens, seed=seed)

    def _temperature(self, plan: Plan) -> float:
        share = _number(self._settings.seed, plan.number, -1) / 2**64
        return 0.0 if share < self._settings.greedy_share else self._settings.temperature


def _number(*key: int) -> int:
    """64 bits that depend on the key alone."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")


def own_plans(start: int) -> Iterator[Plan]:
    """Conversations in which the model writes both sides, without end."""
    for number in count(start):
        yield Plan(number, (None,) * (2 if number % SECOND_TURN == SECOND_TURN - 1 else 1))


def answer_plans(conversations: Sequence[Conversation]) -> list[Plan]:
    """The questions of some conversations, to be answered one after the other.

    Raises UsageError for one whose questions depend on its answers, as results of tools do.
    """
    plans = []
    for number, conversation in enumerate(conversations):
        if conversation.uses_tools:
            raise UsageError("results of tools cannot be answered anew")
        opening = tuple(message for message in conversation.messages if message["role"] == "system")
        asked = tuple(message["content"] for message in conversation.messages if message["role"] == "user")
        plans.append(Plan(number, asked, opening))
    return plans


def synthesize(
    author: Author,
    plans: Iterator[Plan],
    journal: Journal,
    wanted: int | None = None,
    progress: Callable[[bool], object] | None = None,
) -> None:
    """Write conversations into ``journal`` until the plans end, or until ``wanted`` of them are kept in it.

    plans: from `Journal.next` on. progress: called for each conversation, with whether it is kept.
    Raises DiskFullError; OutriderError if next to nothing is of use.
    """
    if wanted is not None and journal.kept >= wanted:
        return
    before = journal.kept
    for tried, written in enumerate(author.write(plans), 1):
        number, messages = written.plan.number, tuple(written.messages)
        kept = written.dropped is None and journal.keep(
            number, messages, temperature=written.temperature, complete=written.complete
        )
        if written.dropped is not None:
            journal.drop(number, written.dropped)
        if progress is not None:
            progress(kept)
        if wanted is not None and journal.kept >= wanted:
            return
        if tried >= _PATIENCE and journal.kept - before < _WORST_YIELD * tried:
            reasons = ", ".join(f"{reason}: {number}" for reason, number in journal.dropped.most_common())
            raise OutriderError(
                f"only {journal.kept - before} of {tried} conversations that the model wrote are of use ({reasons}); "
                "is it a chat model? Give --data instead"
            )
