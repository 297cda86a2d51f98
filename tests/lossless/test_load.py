"""The promise under load: whatever runs beside a request, whatever was cached or taken away, its tokens are the same.

The target is a function of the visible history, so that a difference is a fault of the engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core.config import EngineConfig, SpeculativeConfig, SpeculativeOverride
from outrider.core.sampling import SamplingParams
from outrider.drafters import build
from outrider.drafters.base import DrafterContext, OpenExecutor
from outrider.drafters.none import NoDrafter
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.request import Request
from outrider.executors.base import CostCurve, Segment
from outrider.models.loader import Model
from tests.support.fakes import EOS, VOCAB, ChaosDrafter, FakeExecutor, fake_model, make_engine, run
from tests.support.grammars import CHOICE, MODEL, NESTED, REGEX

PAGE = 4
MACHINE = CostCurve((1, 8, 64), (1.0, 1.2, 3.0))
METHODS = (None, "none", "ngram", "suffix", "recycle", "lookahead", "suffix+recycle")


@dataclass(frozen=True)
class Asked:
    """One request as a client sends it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tenant: str
    priority: int
    speculation: SpeculativeOverride | None

    def submit(self, engine: Engine) -> Request:
        return engine.add(self.prompt, self.params, self.tenant, self.priority, self.speculation)


def parameters(number: int, choose: random.Random) -> SamplingParams:
    """Every parameter now and then; one request in three is held to a structure."""
    structure = choose.choice([REGEX, NESTED, CHOICE]) if number % 3 == 0 else None
    own: dict[str, Any] = {"structured_outputs": structure}
    if structure is None:
        own["min_tokens"] = choose.choice([0, 1, 8])
        own["ignore_eos"] = choose.random() < 0.3
        own["banned_token_ids"] = choose.choice([(), (9, 10, 11)])
    return SamplingParams(
        max_tokens=choose.randint(8, 34),
        seed=number,
        temperature=choose.choice([0.0, 0.7, 1.2]),
        top_k=choose.choice([0, 5]),
        top_p=choose.choice([1.0, 0.9]),
        min_p=choose.choice([0.0, 0.05]),
        repetition_penalty=choose.choice([1.0, 1.3]),
        frequency_penalty=choose.choice([0.0, 0.4]),
        presence_penalty=choose.choice([0.0, 0.6]),
        logit_bias=choose.choice([{}, {7: 1.5, 8: -3.0}]),
        stop=choose.choice([(), ("ab", "k")]),
        stop_token_ids=choose.choice([(), (20,)]),
        logprobs=choose.choice([None, 2]),
        **own,
    )


@cache
def workload() -> tuple[Asked, ...]:
    """64 requests: parameters, methods, tenants and priorities of every kind; prompts that share their beginnings."""
    choose = random.Random(7)
    beginnings = [tuple(choose.randrange(3, VOCAB) for _ in range(n)) for n in (0, 9, 24, 40)]
    asked = []
    for number in range(64):
        tail = tuple(choose.randrange(3, VOCAB) for _ in range(choose.randint(1, 12)))
        params = parameters(number, choose)
        method = choose.choice(METHODS)
        nodes = choose.choice([None, 1, 5, 12]) if method != "none" else None
        speculation = SpeculativeOverride(method, nodes) if method or nodes else None
        asked.append(
            Asked(choose.choice(beginnings) + tail, params, choose.choice("ab"), choose.randint(0, 2), speculation)
        )
    return tuple(asked)


@cache
def plain() -> tuple[RequestOutput, ...]:
    """Each request alone, in an engine of its own that neither drafts nor caches."""
    answers = []
    uncached = EngineConfig(enable_prefix_caching=False)
    for asked in workload():
        engine = make_engine(NoDrafter(None), engine_config=uncached, model=MODEL)  # type: ignore[arg-type]
        request = engine.add(asked.prompt, asked.params)
        run(engine, [request])
        answers.append(request.result())
    return tuple(answers)


def engine_of(
    executor: FakeExecutor,
    *,
    caching: bool,
    acceptance: str = "coupled",
    price: CostCurve | None = MACHINE,
    **sizes: int,
) -> Engine:
    return make_engine(
        ChaosDrafter(3),
        config=SpeculativeConfig(num_speculative_tokens=8, acceptance=acceptance),
        executor=executor,
        engine_config=EngineConfig(enable_prefix_caching=caching, **{"max_batch_size": 64, **sizes}),
        model=MODEL,
        price=price,
    )


def step(engine: Engine, executor: FakeExecutor) -> list[Request]:
    stepped = engine.step()
    engine._cache.check_integrity()
    assert all(executor.pending(seq) == 0 for seq in executor._committed)
    for request in engine._scheduler.running:
        assert executor._committed[request.seq] == request.view.tokens[: executor.length(request.seq)]
    names = {page.number: digest for digest, page in engine._cache._pages.items()}
    for page, digest in names.items():
        assert digest in named(executor._text_of[page]), "a page is known by the text that it holds"
    return stepped


@cache
def named(text: tuple[int, ...]) -> set[bytes]:
    """What a page with this text up to its end is called, for each tenant."""
    names = set()
    for tenant in ("a", "b", "default"):
        view = SimpleNamespace(tokens=list(text), tenant=tenant)
        request = SimpleNamespace(view=view, page_digests=[])
        names.add(PrefixCache(FakeExecutor(page_size=PAGE))._digests(request, len(text) // PAGE)[-1])  # type: ignore[arg-type]
    return names


def finish(engine: Engine, executor: FakeExecutor, requests: Sequence[Request], limit: int = 5000) -> None:
    for _ in range(limit):
        if all(request.finished for request in requests):
            return
        step(engine, executor)
    raise AssertionError("requests did not end")


def test_the_workload_has_every_way_to_end() -> None:
    reasons = {(output.finish_reason, type(output.stop_reason)) for output in plain()}
    assert reasons == {("length", type(None)), ("stop", type(None)), ("stop", str), ("stop", int)}
    for asked, output in zip(workload(), plain(), strict=True):
        if asked.params.structured_outputs == CHOICE and output.finish_reason == "stop" and output.stop_reason is None:
            assert output.text in CHOICE.choice  # type: ignore[operator]


def same(requests: Sequence[Request], expected: Sequence[RequestOutput]) -> None:
    for request, alone in zip(requests, expected, strict=True):
        output = request.result()
        assert (output.token_ids, output.finish_reason) == (alone.token_ids, alone.finish_reason), request.id
        assert output.logprobs == alone.logprobs


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kv_tokens", [8192, 88], ids=["roomy", "tight"])
def test_all_at_once_is_one_by_one(caching: bool, kv_tokens: int) -> None:
    executor = FakeExecutor(kv_tokens=kv_tokens, page_size=PAGE)
    engine = engine_of(executor, caching=caching)
    requests = [asked.submit(engine) for asked in workload()]
    finish(engine, executor, requests)
    same(requests, plain())
    stats = engine.stats
    assert (stats.preemptions > 0) == (kv_tokens == 88)
    if stats.preemptions:
        moved = [request for request in requests if request.result().preemptions]
        assert any(request.sampling.params.structured_outputs for request in moved), (
            "a grammar has to be taken up again"
        )
    assert stats.num_accepted_tokens > 0
    assert executor.open_sequences == 0
    if caching and kv_tokens == 8192:
        again = [asked.submit(engine) for asked in workload()]
        finish(engine, executor, again)
        same(again, plain())
        assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("caching", [True, False])
def test_one_by_one_in_one_engine(caching: bool) -> None:
    executor = FakeExecutor(kv_tokens=256, page_size=PAGE)
    engine = engine_of(executor, caching=caching)
    requests = []
    for asked in workload():
        requests.append(asked.submit(engine))
        finish(engine, executor, requests)
    same(requests, plain())
    assert (engine.stats.prefix_cache_hits > 0) == caching


@pytest.mark.parametrize("seed", range(6))
def test_coming_and_going(seed: int) -> None:
    """Requests arrive between rounds, some are aborted, and KV, rows and batch are too small for what is asked."""
    choose = random.Random(seed)
    executor = FakeExecutor(kv_tokens=120 + 40 * seed, page_size=PAGE)
    engine = engine_of(executor, caching=seed % 2 == 0, max_batch_size=9, max_batched_tokens=20, prefill_chunk=7)
    coming = list(zip(workload(), plain(), strict=True))
    choose.shuffle(coming)
    running: list[tuple[Request, RequestOutput]] = []
    for asked, alone in coming:
        running.append((asked.submit(engine), alone))
        for _ in range(choose.randint(0, 3)):
            step(engine, executor)
        if choose.random() < 0.1:
            engine.abort(choose.choice(running)[0])
    finish(engine, executor, [request for request, _ in running])
    for request, alone in running:
        output = request.result()
        assert output.token_ids == alone.token_ids[: len(output.token_ids)]
        assert output.finish_reason in ("aborted", alone.finish_reason)
    assert executor.largest_pass <= 20
    assert executor.open_sequences == 0
    engine._cache.clear()
    assert executor.free_tokens == executor.total_tokens, "no page is lost"


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_other_rules_lose_nothing_under_load(acceptance: str) -> None:
    """They promise the distribution, not the text; what they must not do is lose, mix up or break requests."""
    executor = FakeExecutor(kv_tokens=100, page_size=PAGE)
    engine = engine_of(executor, caching=True, acceptance=acceptance)
    requests = [asked.submit(engine) for asked in workload()]
    finish(engine, executor, requests)
    assert engine.stats.preemptions > 0
    for request, alone in zip(requests, plain(), strict=True):
        if request.sampling.params.temperature == 0:
            assert request.result().token_ids == alone.token_ids


def test_the_check_would_notice_a_page_of_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that must fail: names that leave out what came before a page."""
    from outrider.engine import prefix_cache

    monkeypatch.setattr(prefix_cache, "_digest", lambda before, tokens: tokens[:8])
    executor = FakeExecutor(page_size=PAGE)
    engine = engine_of(executor, caching=True)
    requests = []
    for asked in workload():
        requests.append(asked.submit(engine))
        run(engine, requests)
    assert any("pages of other texts" in (request.error or "") for request in requests)


# -- an executor that fails --------------------------------------------------------------------------------------------


def test_an_executor_error_ends_its_batch_and_nothing_else() -> None:
    executor = FakeExecutor(page_size=PAGE)
    engine = engine_of(executor, caching=True, max_batch_size=8)
    requests = [asked.submit(engine) for asked in workload()[:24]]
    executor.fail_at = {3, 9}
    finish(engine, executor, requests)
    failed = [request for request in requests if request.result().finish_reason == "error"]
    assert 8 <= len(failed) <= 16
    assert all("on fire" in (request.error or "") for request in failed)
    for request, alone in zip(requests, plain(), strict=False):
        if request not in failed:
            assert request.result().token_ids == alone.token_ids
    assert executor.open_sequences == 0
    again = [asked.submit(engine) for asked in workload()]
    finish(engine, executor, again)
    same(again, plain())


def test_pages_held_by_others_are_an_error_and_not_a_wait() -> None:
    executor = FakeExecutor(kv_tokens=32, page_size=PAGE)
    engine = engine_of(executor, caching=True, max_batch_size=4)
    foreign = executor.open()
    executor.forward([Segment.chain(foreign, [5] * 24)])
    requests = [engine.add([5] * 10, SamplingParams(max_tokens=12)) for _ in range(2)]
    for _ in range(100):
        engine.step()
    assert [request.result().finish_reason for request in requests] == ["error", "error"]
    executor.close(foreign)
    last = engine.add([5] * 10, SamplingParams(max_tokens=12, ignore_eos=True))
    finish(engine, executor, [last])
    assert last.result().finish_reason == "length"


# -- answers that go on ------------------------------------------------------------------------------------------------


def test_an_answer_is_found_by_the_request_that_goes_on_from_it() -> None:
    """Pages of what was drafted and accepted are cached under the text that they hold, also behind a stop."""
    executor = FakeExecutor(page_size=PAGE)
    engine = engine_of(executor, caching=True)
    for asked in workload():
        request = asked.submit(engine)
        finish(engine, executor, [request])
        text = request.view.tokens
        again = engine.add([*text, 5], asked.params, asked.tenant)
        finish(engine, executor, [again])
        # Of the last token emitted there is no KV yet.
        assert again.cached_tokens >= (len(text) - 1) // PAGE * PAGE


# -- rules that compare p with q ---------------------------------------------------------------------------------------


class OpenCoin(OpenExecutor):
    """A draft model equal to the target of `coin`."""

    def __call__(self, model: Model) -> FakeExecutor:
        return FakeExecutor(coin)


def coin(history: Sequence[int]) -> torch.Tensor:
    """The end of the text or one of two other tokens, at 1/2 and 1/4 each, whatever came before."""
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[EOS, 5, 6]] = torch.log(torch.tensor([0.5, 0.25, 0.25]))
    return logits


@pytest.mark.parametrize("short_of", ["rows", "memory"])
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_whether_there_is_room_for_a_draft_does_not_depend_on_what_was_drawn(acceptance: str, short_of: str) -> None:
    """A draft that begins with an end token is a short one. Were it verified where a longer one is dropped, texts would
    end too early: here three first tokens in four would be end tokens, and not one in two.
    """
    config = SpeculativeConfig(
        method="draft_model", model="fake", num_speculative_tokens=3, acceptance=acceptance, adaptive=False
    )
    drafter = build(DrafterContext(config, fake_model(), OpenCoin()))
    executor = FakeExecutor(coin, kv_tokens=12)
    if short_of == "memory":
        executor.forward([Segment.chain(executor.open(), [5] * 10)])
    sizes = EngineConfig(
        max_batch_size=1, max_batched_tokens=2 if short_of == "rows" else 64, enable_prefix_caching=False
    )
    engine = make_engine(drafter, config=config, executor=executor, engine_config=sizes)
    ended = 0
    for seed in range(400):
        request = engine.add([5], SamplingParams(temperature=1.0, seed=seed, max_tokens=8))
        engine.step()
        ended += request.output.token_ids == [EOS]
        engine.abort(request)
    # 200 are expected, with a standard deviation of 10.
    assert 150 < ended < 250
