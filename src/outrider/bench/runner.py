"""Run every prompt with every method, interleaved, and keep what happened.

One model and one executor serve all methods. Turn by turn, every method answers the same conversation before the next
turn starts, and the order of the methods rotates, so that a machine that gets slower, or a cache that gets warmer,
favours none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.bench.methods import Method, baseline
from outrider.core.sampling import MAX_SEED

if TYPE_CHECKING:
    from outrider.bench.prompts import Prompt
    from outrider.core.sampling import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import RequestOutput

Message = dict[str, str]

_WARM_UP = "Name three rivers and say where each of them flows."
_WARM_UP_TOKENS = 12


@dataclass(frozen=True)
class Row:
    """One answer of one method. order: its place in this turn's rotation, 0 first.

    identical: whether the token ids equal the reference's; None if there is no reference answer.
    first_difference: index of the first token that differs.
    """

    prompt_id: str
    category: str
    turn: int
    method: str
    order: int
    output: RequestOutput
    identical: bool | None = None
    first_difference: int | None = None


@dataclass(frozen=True)
class Failure:
    """An answer that could not be had, and why."""

    prompt_id: str
    category: str
    turn: int
    method: str
    error: str


@dataclass
class Run:
    """Everything that was measured. baseline: the label of plain decoding, if it was among the methods.

    reference: the method that the others' token ids are compared with: the baseline, or else the first one.
    interrupted: the run was stopped by the user; what is here was finished before that.
    """

    methods: list[str]
    baseline: str | None
    reference: str
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


@dataclass(frozen=True)
class Settings:
    """params: sampling of every answer; if it has a seed, turn number i of the run uses seed + i, for every method.

    system: a system message for every conversation. shared_tenant: all prompts belong to one tenant, so that drafters
    which remember earlier requests may use them; otherwise each conversation is a tenant of its own.
    """

    params: SamplingParams
    system: str | None = None
    shared_tenant: bool = False


def run(
    llm: LLM,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings,
    progress: Callable[[Prompt, Method], None] = lambda prompt, method: None,
) -> Run:
    """Measure. ``llm`` lends its model and executor; ``progress`` is called before each answer.

    A failed answer is recorded and the run goes on. Ctrl-C ends the run and keeps what was finished.
    """
    runner = _Runner(llm, methods, settings, progress)
    try:
        runner.warm_up()
        for prompt in prompts:
            runner.converse(prompt)
    except KeyboardInterrupt:
        runner.result.interrupted = True
    return runner.result


class _Runner:
    def __init__(
        self, llm: LLM, methods: Sequence[Method], settings: Settings, progress: Callable[[Prompt, Method], None]
    ) -> None:
        self._methods = list(methods)
        self._settings = settings
        self._progress = progress
        self._engines = {method.label: llm.with_speculation(method.config) for method in methods}
        self._turns_run = 0
        plain = baseline(methods)
        self.result = Run(
            methods=[method.label for method in methods],
            baseline=plain.label if plain else None,
            reference=plain.label if plain else methods[0].label,
        )

    def warm_up(self) -> None:
        """Let every method pay for first calls (kernels chosen, memory taken) before anything is timed."""
        params = replace(self._settings.params, max_tokens=_WARM_UP_TOKENS, min_tokens=0, seed=0)
        for engine in self._engines.values():
            _answer(engine, [{"role": "user", "content": _WARM_UP}], params, "bench/warm-up")

    def converse(self, prompt: Prompt) -> None:
        """Run one prompt's turns. All methods continue from the same answers, or later turns could not be compared."""
        system = self._settings.system
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            answers = self._turn(prompt, turn, messages)
            if not answers:
                return
            spoken = answers.get(self.result.reference) or next(iter(answers.values()))
            messages.append({"role": "assistant", "content": spoken.text})

    def _turn(self, prompt: Prompt, turn: int, messages: list[Message]) -> dict[str, RequestOutput]:
        """One turn with every method, in rotated order. Returns the answers by method; failures are recorded."""
        params = self._settings.params
        if params.seed is not None:
            params = replace(params, seed=(params.seed + self._turns_run) % (MAX_SEED + 1))
        tenant = "bench" if self._settings.shared_tenant else f"bench/{prompt.id}"
        start = self._turns_run % len(self._methods)
        answers: dict[str, RequestOutput] = {}
        for method in self._methods[start:] + self._methods[:start]:
            self._progress(prompt, method)
            try:
                answers[method.label] = _answer(self._engines[method.label], messages, params, tenant)
            except Exception as error:  # a failure is a result too, and must not cost the other methods theirs
                reason = f"{type(error).__name__}: {error}"
                self.result.failures.append(Failure(prompt.id, prompt.category, turn, method.label, reason))
        reference = answers.get(self.result.reference)
        for order, (label, output) in enumerate(answers.items()):
            self.result.rows.append(_row(prompt, turn, label, order, output, reference))
        self._turns_run += 1
        return answers


def _answer(engine: LLM, messages: list[Message], params: SamplingParams, tenant: str) -> RequestOutput:
    output = engine.chat(messages, params, use_tqdm=False, tenant=tenant)[0].raise_for_error()
    if output.finish_reason == "aborted":  # how the engine hands on Ctrl-C
        raise KeyboardInterrupt
    return output


def _row(
    prompt: Prompt, turn: int, label: str, order: int, output: RequestOutput, reference: RequestOutput | None
) -> Row:
    differs = reference.first_difference(output) if reference else None
    identical = differs is None if reference else None
    return Row(prompt.id, prompt.category, turn, label, order, output, identical, differs)
