"""One test, or more, for each fault that the field has seen (the numbers are those of docs/faults.md).

The target is a function of the visible history, so that "the same text" is bit for bit and any difference is a fault
of the engine, of an acceptance rule or of a drafter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.errors import VocabularyMismatchError
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Budget, Drafter, SequenceView
from outrider.drafters.none import NoDrafter
from outrider.engine.outputs import RequestOutput
from outrider.executors.base import CostCurve
from tests.support.fakes import EOS, VOCAB, ChaosDrafter, FakeExecutor, make_engine, random_logits, run

PROMPT = [5, 9, 11, 4]
PLAIN: dict[object, RequestOutput] = {}


class Scripted(Drafter):
    """Proposes whatever a function of the view says."""

    name = "scripted"

    def __init__(self, tree: object) -> None:
        self._tree = tree

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [self._tree(view) for view in views]  # type: ignore[operator]


def answers(
    drafter: Drafter,
    params: Sequence[SamplingParams],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    config: SpeculativeConfig | None = None,
    executor: FakeExecutor | None = None,
    engine_config: EngineConfig | None = None,
) -> list[RequestOutput]:
    executor = executor or FakeExecutor()
    engine = make_engine(drafter, config=config, executor=executor, engine_config=engine_config)
    prompts = prompts or [PROMPT] * len(params)
    requests = [engine.add(p, own) for p, own in zip(prompts, params, strict=True)]
    run(engine, requests)
    assert executor.open_sequences == 0
    return [request.result() for request in requests]


def plain(params: SamplingParams, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    key = (repr(params), tuple(prompt))
    if key not in PLAIN:
        PLAIN[key] = answers(NoDrafter(None), [params], prompts=[prompt])[0]  # type: ignore[arg-type]
    return PLAIN[key]


def future(view: SequenceView, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What plain decoding will emit after ``view``: the perfect draft."""
    done = len(view.tokens) - view.num_prompt_tokens
    return plain(params, prompt).token_ids[done:]


def oracle(params: SamplingParams, depth: int = 6) -> Scripted:
    return Scripted(lambda view: DraftTree.chain(future(view, params)[: min(depth, view.room)]))


def same(left: RequestOutput, right: RequestOutput) -> None:
    assert left.token_ids == right.token_ids
    assert (left.text, left.finish_reason, left.stop_reason) == (right.text, right.finish_reason, right.stop_reason)


# -- 1: the text changes when speculation is on ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_01_random_trees_never_change_the_text(seed: int) -> None:
    params = [
        SamplingParams(max_tokens=60),
        SamplingParams(max_tokens=60, temperature=0.8, top_p=0.95, seed=seed),
        SamplingParams(max_tokens=40, temperature=1.3, seed=seed + 1, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(max_tokens=40, temperature=1, top_k=5, seed=3, repetition_penalty=1.3, min_tokens=30),
    ]
    drafted = answers(ChaosDrafter(seed), params)
    for output, own in zip(drafted, params, strict=True):
        same(output, plain(own))
    assert sum(output.statistics.accepted for output in drafted) > 20, "the drafts must have been put to use"


def test_01_the_check_would_notice_a_draft_that_is_taken_on_trust() -> None:
    """A twin that must fail: a rule that accepts whatever is drafted changes the text."""
    params = SamplingParams(max_tokens=60)
    engine = make_engine(ChaosDrafter(1))
    rule = engine._rule
    accept = rule.accept

    def credulous(candidates):  # type: ignore[no-untyped-def]
        verdicts = accept(candidates)
        return [
            type(v)(tuple(c.tree.path(len(c.tree) - 1)), v.token) if len(c.tree) else v
            for c, v in zip(candidates, verdicts, strict=True)
        ]

    rule.accept = credulous  # type: ignore[method-assign]
    request = engine.add(PROMPT, params)
    run(engine, [request])
    assert request.result().token_ids != plain(params).token_ids


# -- 2, 3: a stop inside an accepted block; max_tokens -----------------------------------------------------------------


def seed_with_eos(max_tokens: int = 60) -> SamplingParams:
    """Parameters whose plain answer ends by EOS after some tokens."""
    for seed in range(200):
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)
        output = plain(params)
        if output.finish_reason == "stop" and len(output.token_ids) > 6:
            return params
    raise AssertionError("no seed ends by EOS")


def test_02_nothing_is_emitted_or_counted_after_eos() -> None:
    params = seed_with_eos()
    expected = plain(params)

    def past_the_end(view: SequenceView) -> DraftTree:
        rest = [*future(view, params), 7, 8, 9]
        return DraftTree.chain(rest[: min(8, view.room)])

    output = answers(Scripted(past_the_end), [params])[0]
    same(output, expected)
    statistics = output.statistics
    assert statistics.committed == len(output.token_ids)
    assert statistics.drafted <= len(output.token_ids), "nodes below EOS are not even verified"
    assert sum(statistics.accepted_by_position) == statistics.accepted


def test_02_a_stop_string_inside_a_block_ends_it_there() -> None:
    params = SamplingParams(max_tokens=40)
    text = plain(params).text
    params = SamplingParams(max_tokens=40, stop=[text[7:9]])
    expected = plain(params)
    output = answers(oracle(SamplingParams(max_tokens=40), depth=8), [params])[0]
    same(output, expected)
    assert output.statistics.committed == len(output.token_ids) == len(output.timing.token_times)
    assert output.statistics.accepted <= len(output.token_ids)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_03_max_tokens_is_exact(max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    greedy = Scripted(lambda view: DraftTree.chain(future(view, long)[:8]))
    output = answers(greedy, [params])[0]
    assert len(output.token_ids) == max_tokens == output.statistics.committed
    same(output, plain(params))


@pytest.mark.parametrize("max_tokens", [7, 8, 9, 10])
def test_03_the_earlier_of_stop_and_length_wins(max_tokens: int) -> None:
    text = plain(SamplingParams(max_tokens=40)).text
    params = SamplingParams(max_tokens=max_tokens, stop=[text[8]])
    output = answers(oracle(SamplingParams(max_tokens=40), depth=8), [params])[0]
    same(output, plain(params))


# -- 4, 5, 13: parameters are honoured token by token ------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.7},
        {"logit_bias": {4: 5.0, 7: -100.0}},
        {"banned_token_ids": [4, 5, 6, 7, 8]},
        {"min_p": 0.2},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_tokens": 25, "logit_bias": {EOS: 6.0}},
        {"stop_token_ids": [9, 20, 24]},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_04_05_13_parameters_act_per_token_in_trees(changes: dict[str, object], temperature: float) -> None:
    params = SamplingParams(max_tokens=50, temperature=temperature, seed=11, **changes)  # type: ignore[arg-type]
    without = SamplingParams(max_tokens=50, temperature=temperature, seed=11)
    same(answers(ChaosDrafter(5), [params])[0], plain(params))
    perfect = answers(oracle(params, depth=5), [params])[0]
    same(perfect, plain(params))
    assert perfect.statistics.acceptance_rate == 1.0
    if temperature or not {"top_k", "top_p", "min_p"} & set(changes):
        assert plain(params).token_ids != plain(without).token_ids, "or the test would mean nothing"


def test_05_min_tokens_counts_tokens_not_rounds() -> None:
    params = SamplingParams(max_tokens=50, min_tokens=20, logit_bias={EOS: 20.0})
    output = answers(oracle(params, depth=7), [params])[0]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) == 21
    assert output.statistics.rounds < 10


# -- 6, 7: end tokens and limits in drafts -----------------------------------------------------------------------------


def test_06_a_drafted_and_rejected_eos_ends_nothing() -> None:
    params = SamplingParams(max_tokens=30, banned_token_ids=[EOS])
    output = answers(Scripted(lambda view: DraftTree.chain([EOS])), [params])[0]
    same(output, plain(params))
    assert output.statistics.accepted == 0
    assert len(output.token_ids) == 30


def test_07_room_ends_with_the_answer() -> None:
    rooms: list[tuple[int, int]] = []

    def watch(view: SequenceView) -> DraftTree:
        rooms.append((len(view.tokens) - view.num_prompt_tokens, view.room))
        return DraftTree.chain([7] * view.room)

    params = SamplingParams(max_tokens=9, ignore_eos=True)
    same(answers(Scripted(watch), [params], config=SpeculativeConfig(num_speculative_tokens=16))[0], plain(params))
    assert all(done + room + 1 == 9 for done, room in rooms)


def test_07_context_is_never_overrun() -> None:
    executor = FakeExecutor(max_context=20)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    output = answers(ChaosDrafter(2), [params], executor=executor)[0]
    assert len(output.prompt_token_ids) + len(output.token_ids) == 20
    assert output.finish_reason == "length"


# -- 8: broken drafts --------------------------------------------------------------------------------------------------

BROKEN = {
    "NaN score": DraftTree([4], [-1], [math.nan]),
    "infinite score": DraftTree([4], [-1], [math.inf]),
    "token out of range": DraftTree([VOCAB], [-1], [0.5]),
    "negative token": DraftTree([-1], [-1], [0.5]),
    "parent after child": DraftTree([4, 5], [1, -1], [0.5, 0.5]),
    "own parent": DraftTree([4], [0], [0.5]),
    "twins": DraftTree([4, 4], [-1, -1], [0.5, 0.5]),
    "ragged": DraftTree([4, 5], [-1], [0.5]),
    "too many": DraftTree.chain(list(range(3, 20))),
    "NaN q": DraftTree([4], [-1], [0.5], {-1: torch.full((VOCAB,), math.nan)}),
    "zero q": DraftTree([4], [-1], [0.5], {-1: torch.full((VOCAB,), -math.inf)}),
    "short q": DraftTree([4], [-1], [0.5], {-1: torch.zeros(VOCAB - 1)}),
    "no tree": None,
    "no token": DraftTree([None], [-1], [0.5]),  # type: ignore[list-item]
    "score in words": DraftTree([4], [-1], ["likely"]),  # type: ignore[list-item]
    "q as a list": DraftTree([4], [-1], [0.5], {-1: [0.0] * VOCAB}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_08_a_broken_draft_costs_its_round_only(name: str, acceptance: str) -> None:
    calls = 0

    def sometimes(view: SequenceView) -> DraftTree:
        nonlocal calls
        calls += 1
        return BROKEN[name] if calls % 2 else DraftTree.chain([4])  # type: ignore[return-value]

    config = SpeculativeConfig(num_speculative_tokens=8, acceptance=acceptance)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    output = answers(Scripted(sometimes), [params], config=config)[0]
    same(output, plain(params))
    assert output.statistics.failures == (calls + 1) // 2
    assert output.statistics.drafted == calls // 2


def test_08_minus_infinity_is_legal_and_nan_is_an_error() -> None:
    def with_holes(history: Sequence[int]) -> torch.Tensor:
        logits = random_logits(history)
        logits[::3] = -math.inf
        return logits

    params = [SamplingParams(max_tokens=20, temperature=t, seed=1) for t in (0.0, 1.0)]
    drafted = answers(ChaosDrafter(3), params, executor=FakeExecutor(with_holes))
    without = answers(NoDrafter(None), params, executor=FakeExecutor(with_holes))  # type: ignore[arg-type]
    for left, right in zip(drafted, without, strict=True):
        same(left, right)
        assert not {token for token in left.token_ids if token % 3 == 0}

    broken = FakeExecutor(lambda history: torch.full((VOCAB,), math.nan if history[0] == 20 else 0.0))
    ill, well = answers(NoDrafter(None), params, prompts=[[20], [5]], executor=broken)  # type: ignore[arg-type]
    assert (ill.finish_reason, ill.token_ids) == ("error", [])
    assert "NaN" in (ill.error or "")
    assert well.finish_reason in ("stop", "length"), "a neighbour's trouble is not its own"


def test_08_what_the_drafter_got_around_is_counted_where_it_happened() -> None:
    class Partly(ChaosDrafter):
        def take_failures(self) -> Mapping[str, frozenset[int]]:
            return {self.name: frozenset({1})}

    params = SamplingParams(max_tokens=5, ignore_eos=True)
    well, ill = answers(Partly(), [params, params], prompts=[PROMPT, PROMPT])
    assert (well.statistics.failures, ill.statistics.failures > 0) == (0, True)


def test_08_a_missing_tree_is_counted() -> None:
    class Short(ChaosDrafter):
        def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
            return []

    params = SamplingParams(max_tokens=5, ignore_eos=True)
    output = answers(Short(), [params])[0]
    same(output, plain(params))
    assert output.statistics.failures > 0


# -- 9, 10: neighbours and tenants -------------------------------------------------------------------------------------


def test_09_neighbours_do_not_leak() -> None:
    """One sequence fully accepted, its neighbour rejected at once, in every round."""
    params = [SamplingParams(max_tokens=40, temperature=0.9, seed=s, ignore_eos=True) for s in (1, 2, 3)]
    prompts = [[5, 9], [9, 5, 6, 8, 10], [12]]
    answer_of = [plain(p, prompt).token_ids for p, prompt in zip(params, prompts, strict=True)]

    def half(view: SequenceView) -> DraftTree:
        rest = answer_of[view.request_id][len(view.tokens) - view.num_prompt_tokens :][: min(5, view.room)]
        if view.request_id == 1:
            rest = [(token + 1) % VOCAB for token in rest]
        return DraftTree.chain(rest)

    outputs = answers(Scripted(half), params, prompts=prompts)
    assert [o.token_ids for o in outputs] == answer_of
    assert outputs[0].statistics.acceptance_rate == outputs[2].statistics.acceptance_rate == 1.0
    assert outputs[1].statistics.accepted == 0


@pytest.mark.parametrize("seed", range(5))
def test_09_an_error_of_a_neighbour_leaves_no_rows_behind(seed: int) -> None:
    """The round fails after its forward pass; what is pending then must not be taken for the next round's rows."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=3)
    executor = FakeExecutor()
    engine = make_engine(ChaosDrafter(seed), executor=executor)
    request = engine.add(PROMPT, params)
    for step in range(200):
        if request.finished:
            break
        if step % 3 == 2:
            neighbour = engine.add([4], replace(params, banned_token_ids=range(VOCAB)))
            engine.step()
            assert neighbour.result().finish_reason == "error"
            assert "no token is left" in (neighbour.result().error or "")
            assert request.seq is None or executor.pending(request.seq) == 0
        else:
            engine.step()
    same(request.result(), plain(params))


def test_09_the_batch_does_not_matter() -> None:
    params = [SamplingParams(max_tokens=5 + 7 * s, temperature=0.3 * s, seed=s) for s in range(6)]
    prompts = [[3 + s] * (1 + 9 * s) for s in range(6)]
    for batch_size, chunk in ((1, 512), (2, 7), (6, 3)):
        outputs = answers(
            ChaosDrafter(4),
            params,
            prompts=prompts,
            engine_config=EngineConfig(max_batch_size=batch_size, prefill_chunk=chunk),
        )
        for output, own, prompt in zip(outputs, params, prompts, strict=True):
            same(output, plain(own, prompt))


# -- 11: vocabularies --------------------------------------------------------------------------------------------------


def test_11_another_vocabulary_is_refused() -> None:
    from outrider.drafters.vocabulary import check_vocabulary
    from tests.support.fakes import fake_model

    small = fake_model("small", tokenizer=False, vocab_size=VOCAB - 1)
    with pytest.raises(VocabularyMismatchError):
        check_vocabulary(fake_model("big", tokenizer=False), small)


# -- 12: metrics -------------------------------------------------------------------------------------------------------


def test_12_metrics_are_what_they_say() -> None:
    params = SamplingParams(max_tokens=31, ignore_eos=True)
    output = answers(oracle(params, depth=4), [params], config=SpeculativeConfig(num_speculative_tokens=4))[0]
    statistics = output.statistics
    assert statistics.rounds == 7, "six rounds of 4 accepted and a bonus token, one of a single token"
    assert statistics.committed == 31
    assert statistics.drafted == statistics.accepted == 24
    assert statistics.accepted_by_position == [6, 6, 6, 6]
    assert statistics.mean_acceptance_length == pytest.approx(31 / 7)
    assert statistics.accepted_by_source == statistics.drafted_by_source == {"scripted": 24}


# -- 15, 16, 17 --------------------------------------------------------------------------------------------------------


class Fragile(ChaosDrafter):
    """Raises in one method at chosen calls."""

    name = "fragile"

    def __init__(self, method: str, every: int) -> None:
        super().__init__(6)
        self._method, self._every, self.calls = method, every, 0

    def _maybe(self, method: str) -> None:
        if method == self._method:
            self.calls += 1
            if self.calls % self._every == 0:
                raise RuntimeError("poisoned")

    def open(self, view: SequenceView) -> None:
        self._maybe("open")

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        self._maybe("propose")
        return super().propose(views, budget)

    def observe(self, observations: Sequence[object]) -> None:  # type: ignore[override]
        self._maybe("observe")

    def close(self, view: SequenceView) -> None:
        self._maybe("close")


@pytest.mark.parametrize("method", ["open", "propose", "observe", "close"])
def test_15_a_failure_costs_one_round_and_is_told(method: str, caplog: pytest.LogCaptureFixture) -> None:
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.5, seed=s) for s in range(3)]
    drafter = Fragile(method, every=3)
    with caplog.at_level(logging.WARNING):
        outputs = answers(drafter, params)
    for output, own in zip(outputs, params, strict=True):
        same(output, plain(own))
    assert "fragile" in caplog.text
    assert "poisoned" in caplog.text
    assert sum(o.statistics.accepted for o in outputs) > 0, "speculation must be back after the failure"
    if method == "propose":
        assert all(o.statistics.failures > 0 for o in outputs)


@pytest.mark.parametrize("adaptive", [False, True])
def test_15_speculation_is_back_in_the_round_after_the_poisoned_one(
    adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner at work as well, with prices that do not depend on the clock."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    right, calls, poisoned = oracle(params, depth=4), 0, 4

    def tree(view: SequenceView) -> DraftTree:
        nonlocal calls
        calls += 1
        if calls == poisoned:
            raise RuntimeError("poisoned")
        return right.propose([view], Budget(4, 4))[0]

    config = SpeculativeConfig(num_speculative_tokens=4, adaptive=adaptive)
    engine = make_engine(Scripted(tree), config=config, price=CostCurve((1, 64), (1.0, 1.1)))
    for name in ("observe_forward", "observe_beside"):
        monkeypatch.setattr(engine._planner, name, lambda *_, **__: None)
    request = engine.add(PROMPT, params)
    drafted, failures = [], []
    while not request.finished:
        before = request.statistics.drafted, request.statistics.failures
        engine.step()
        drafted.append(request.statistics.drafted - before[0])
        failures.append(request.statistics.failures - before[1])
    same(request.result(), plain(params))
    assert sum(failures) == 1
    at = failures.index(1)
    assert drafted[at] == 0
    assert drafted[at - 1] > 0
    assert drafted[at + 1] > 0


def test_16_logprobs_are_the_targets() -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=30, temperature=temperature, seed=4, logprobs=3, ignore_eos=True)
        drafted, without = answers(ChaosDrafter(8), [params])[0], plain(params)
        assert drafted.statistics.accepted > 0
        assert drafted.logprobs == without.logprobs
        assert drafted.logprobs is not None
        assert [entry.token_id for entry in drafted.logprobs] == drafted.token_ids
        history = [*PROMPT]
        for entry in drafted.logprobs:
            expected = torch.log_softmax(random_logits(history), -1)
            assert entry.logprob == float(expected[entry.token_id])
            assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()
            history.append(entry.token_id)


def test_17_a_drafter_in_vain_is_reported_by_name_once(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    hopeless = Scripted(lambda view: DraftTree.chain([(future(view, params)[0] + 1) % VOCAB][: view.room]))
    with caplog.at_level(logging.WARNING):
        answers(hopeless, [params])
    assert len([r for r in caplog.records if "'scripted'" in r.getMessage()]) == 1
    assert len(caplog.records) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        answers(oracle(params, depth=1), [params])
    assert not caplog.records
