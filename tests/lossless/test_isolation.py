"""Tenants see nothing of each other: what A has said changes neither what B gets nor what it takes to get it.

The planner is on, with everything that it, the drafters and the paces learn. What the clock says of this machine is no
secret of a tenant's, and is never the same twice: prices are held, and time goes on by one tick whenever it is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from outrider.core.config import EngineConfig, SpeculativeConfig, SpeculativeOverride
from outrider.core.sampling import SamplingParams
from outrider.drafters import costly, feature_drafter, pace
from outrider.drafters.base import Drafter, DrafterContext
from outrider.engine import engine as engine_module
from outrider.engine import speculators
from outrider.engine.engine import Engine
from outrider.engine.price import ForwardPrice
from outrider.engine.request import Request
from tests.lossless.test_load import MACHINE, PAGE, Asked, engine_of, finish, plain, workload
from tests.support.fake_heads import OpenFakeHeads, build_with_heads, hidden
from tests.support.fakes import FakeExecutor, make_engine
from tests.support.grammars import MODEL

TICK = 2.0**-6
"""Seconds; a power of two, so that differences are exact however late it is. Small beside a round, but not nothing."""
ASKED = ("ngram", "suffix", "recycle", "lookahead", "suffix+recycle")
"""Methods that requests ask for."""
OWN = ("auto", "eagle", "eagle3", "mtp", "medusa", "suffix+eagle3", "auto+eagle3")
"""Those that an engine is started with, since they may run a model."""
Seen = tuple[int, ...]


class HeldPrice(pace.DraftPrice):
    """What a level of a draft takes: known from the beginning, and always the same."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(9):
            self.add(0.05)

    def observe(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices that stay, and a clock that knows nothing of how long anything takes."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: TICK * next(ticks))
    for module in (engine_module, speculators, costly, feature_drafter):
        monkeypatch.setattr(module, "time", clock)
    for name in ("observe", "observe_chunk", "observe_beside"):
        monkeypatch.setattr(ForwardPrice, name, lambda *_: None)
    monkeypatch.setattr(pace, "DraftPrice", HeldPrice)


def requests_of(tenant: str, method: str | None, count: int = 24, *, structured: bool = False) -> list[Asked]:
    """Long ones, of which some have the prompt of an earlier one: there is something to remember.

    structured: those that are held to a regex, a grammar or a choice, in place of those that are free.
    """
    override = None if method is None else SpeculativeOverride(method, 6)
    kind = [each for each in workload() if (each.params.structured_outputs is not None) == structured]
    long = [each for each in kind if len(each.prompt) > PAGE][: count // 2]
    return [
        Asked(
            each.prompt, replace(each.params, max_tokens=40, min_tokens=0, repetition_penalty=1.0), tenant, 0, override
        )
        for each in [*long, *long]
    ]


def measured(engine: Engine, executor: FakeExecutor, asked: Sequence[Asked]) -> list[tuple[Seen, list[int]]]:
    """What a tenant can see of its requests: passes and rows that they took, what was drafted and accepted, texts."""
    seen = []
    for each in asked:
        before = executor.forwards, executor.rows
        request = each.submit(engine)
        finish(engine, executor, [request])
        s = request.statistics
        figures = (executor.forwards - before[0], executor.rows - before[1], s.drafted, s.accepted, s.rounds)
        seen.append(((*figures, request.cached_tokens), list(request.result().token_ids)))
    return seen


def open_engine(method: str | None = None) -> tuple[Engine, FakeExecutor]:
    """An engine that drafts with ``method`` unless requests ask for another, and its executor."""
    executor = FakeExecutor(page_size=PAGE, hidden=hidden)
    if method is None:
        return engine_of(executor, caching=True), executor
    config = SpeculativeConfig(method=method, num_speculative_tokens=8)
    drafter: Drafter = build_with_heads(DrafterContext(config, MODEL, OpenFakeHeads(noise=0.5)))
    engine = make_engine(
        drafter,
        config=config,
        executor=executor,
        engine_config=EngineConfig(max_batch_size=64),
        model=MODEL,
        price=MACHINE,
    )
    # What a level of a head takes is known to all: it is the machine's.
    measured(engine, executor, requests_of("default", None, 8))
    return engine, executor


@pytest.mark.parametrize("method", [*ASKED, *OWN])
def test_what_a_tenant_has_said_changes_nothing_for_another(method: str) -> None:
    own, override = (method, None) if method in OWN else (None, method)
    (quiet, alone), (busy, after) = (open_engine(own) for _ in range(2))
    first = measured(busy, after, requests_of("a", override))
    found = measured(busy, after, requests_of("b", override))
    assert found == measured(quiet, alone, requests_of("b", override))
    assert sum(figures[2] for figures, _ in found) > 0, "the planner lets something be drafted"
    assert measured(busy, after, requests_of("a", override)) != first, "what A has said itself does help A"


@pytest.mark.parametrize("method", [*ASKED, *OWN])
def test_nor_where_the_text_is_held_to_a_structure(method: str) -> None:
    """A has said the very same things, held to the same structures: grammars, their matchers and what is drafted under
    them are there already, but not for B.
    """
    own, override = (method, None) if method in OWN else (None, method)
    (quiet, alone), (busy, after) = (open_engine(own) for _ in range(2))
    first = measured(busy, after, requests_of("a", override, structured=True))
    found = measured(busy, after, requests_of("b", override, structured=True))
    assert found == measured(quiet, alone, requests_of("b", override, structured=True))
    assert sum(figures[2] for figures, _ in found) > 0, "drafted"
    assert sum(figures[3] for figures, _ in found) > 0, "accepted"
    assert measured(busy, after, requests_of("a", override, structured=True)) != first


def chatter(engine: Engine, kind: str) -> list[Request]:
    """What A says beside B: the same thing again and again, what nobody can foresee, or nothing."""
    if kind == "nothing":
        return []
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0 if kind == "predictable" else 2.0)
    prompts = [[5] * 12] * 3 if kind == "predictable" else [[3 + n, 9 + n, 4 + n] * 4 for n in range(3)]
    return [engine.add(prompt, replace(params, seed=n), "a") for n, prompt in enumerate(prompts)]


def beside(kind: str, *, planned: bool) -> tuple[list[list[int]], list[Seen]]:
    """B's texts, and what was drafted and accepted for each, while A speaks. planned: whether the planner is on."""
    executor = FakeExecutor(page_size=PAGE)
    engine = engine_of(executor, caching=True, price=MACHINE if planned else None)
    others = chatter(engine, kind)
    texts, seen = [], []
    for each in requests_of("b", "suffix+recycle", 16):
        request = each.submit(engine)
        finish(engine, executor, [request])
        s = request.statistics
        texts.append(list(request.result().token_ids))
        seen.append((s.drafted, s.accepted, s.rounds, request.cached_tokens))
    assert kind == "nothing" or sum(len(other.output.token_ids) for other in others) > 100
    return texts, seen


@pytest.mark.parametrize("kind", ["predictable", "random"])
def test_side_by_side_the_text_is_the_same_whatever_the_other_says(kind: str) -> None:
    """Nodes are not: under the planner those of all requests compete for the rows that pay (docs/serving.md)."""
    assert beside(kind, planned=True)[0] == beside("nothing", planned=True)[0]


@pytest.mark.parametrize("kind", ["predictable", "random"])
def test_side_by_side_without_a_planner_the_drafts_are_the_same_too(kind: str) -> None:
    assert beside(kind, planned=False) == beside("nothing", planned=False)


@pytest.mark.parametrize("structured", [False, True])
def test_the_check_would_notice_a_memory_that_is_shared(monkeypatch: pytest.MonkeyPatch, structured: bool) -> None:
    """A twin that must fail: a store that knows one tenant alone."""
    from outrider.core.tenants import TenantStore

    get = TenantStore.get
    monkeypatch.setattr(TenantStore, "get", lambda self, _: get(self, "everyone"))
    (quiet, alone), (busy, after) = (open_engine() for _ in range(2))
    mine, others = (requests_of(tenant, "suffix", structured=structured) for tenant in "ba")
    measured(busy, after, others)
    assert measured(busy, after, mine) != measured(quiet, alone, mine)


def name_ways(engine: Engine, executor: FakeExecutor) -> None:
    """A names a hundred ways to speculate, all of them cascades of their own."""
    members = ["ngram", "suffix", "recycle", "lookahead", "auto"]
    ways = ["+".join(way) for size in (3, 4) for way in itertools.permutations(members, size)][:100]
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    finish(engine, executor, [engine.add([5, 6, 7], short, "a", 0, SpeculativeOverride(way)) for way in ways])


def learned(*, named: bool) -> list[tuple[Seen, list[int]]]:
    """What B sees of its second requests by a method that its first ones asked for. named: A names ways in between."""
    engine, executor = open_engine()
    measured(engine, executor, requests_of("b", "suffix+recycle"))
    if named:
        name_ways(engine, executor)
    return measured(engine, executor, requests_of("b", "suffix+recycle"))


def test_ways_to_speculate_that_a_tenant_names_push_out_none_of_another() -> None:
    assert learned(named=True) == learned(named=False)


def test_the_check_would_notice_ways_that_are_pushed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that must fail: all of them have one owner, so that what was named long ago is given up first."""
    monkeypatch.setattr(speculators, "owner_of", lambda _: "everyone")
    assert learned(named=True) != learned(named=False)


def test_texts_are_those_of_plain_decoding() -> None:
    """Under held prices as well: the tests above do not compare one wrong text with another."""
    engine, executor = open_engine("auto")
    for asked, alone in list(zip(workload(), plain(), strict=True))[:20]:
        request = replace(asked, speculation=None).submit(engine)
        finish(engine, executor, [request])
        assert request.result().token_ids == alone.token_ids
