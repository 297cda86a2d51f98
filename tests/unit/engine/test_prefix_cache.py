"""The prefix cache: what is found, what is given up first, and books that add up whatever happens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.core.errors import KVCacheFullError
from outrider.engine.prefix_cache import PrefixCache
from outrider.executors.base import COMMITTED, Segment
from tests.support.fakes import FakeExecutor

PAGE = 4


def request_of(tokens: list[int], tenant: str = "a", *, cached: bool = True) -> Any:
    """As much of a request as the cache looks at."""
    view = SimpleNamespace(tokens=tokens, tenant=tenant)
    return SimpleNamespace(view=view, seq=None, page_digests=[], entered_pages=0, may_start_cached=cached)


def forward(executor: FakeExecutor, cache: PrefixCache, request: Any) -> None:
    """All that is missing of the request's text, and its pages entered."""
    missing = request.view.tokens[executor.length(request.seq) :]
    executor.forward([Segment.chain(request.seq, missing)])
    executor.commit(request.seq, range(len(missing)))
    cache.enter(request)


def run_through(executor: FakeExecutor, cache: PrefixCache, tokens: list[int], tenant: str = "a") -> int:
    request = request_of(tokens, tenant)
    found = cache.open(request)
    forward(executor, cache, request)
    cache.close(request)
    cache.check_integrity()
    return found


def pair(kv_tokens: int = 64, *, enabled: bool = True) -> tuple[FakeExecutor, PrefixCache]:
    executor = FakeExecutor(kv_tokens=kv_tokens, page_size=PAGE)
    return executor, PrefixCache(executor, enabled=enabled)


def test_the_longest_known_beginning_is_found_but_never_the_last_token() -> None:
    executor, cache = pair()
    text = list(range(3, 15))
    assert run_through(executor, cache, text) == 0
    assert run_through(executor, cache, text) == 8, "the third page holds the last token, whose logits are needed"
    assert run_through(executor, cache, [*text, 20]) == 12
    assert run_through(executor, cache, [*text[:6], 30, 30, 30]) == 4
    assert run_through(executor, cache, [30, *text]) == 0


def test_tenants_have_caches_of_their_own() -> None:
    executor, cache = pair()
    text = list(range(3, 15))
    run_through(executor, cache, text, "a")
    assert run_through(executor, cache, text, "b") == 0
    assert run_through(executor, cache, text, "\ud800") == 0, "any string is a tenant"
    assert run_through(executor, cache, text, "a") == 8


def test_pages_are_shared_by_those_who_run() -> None:
    executor, cache = pair()
    first, second = request_of(list(range(3, 16))), request_of([*range(3, 15), 20])
    cache.open(first)
    forward(executor, cache, first)
    used = cache.used_tokens
    assert cache.open(second) == 12
    forward(executor, cache, second)
    assert cache.used_tokens == used + PAGE
    cache.close(first)
    cache.check_integrity()
    assert cache.used_tokens == 16
    cache.close(second)
    assert (cache.used_tokens, cache.idle_pages) == (0, 3)


def test_what_was_used_last_stays_longest_and_beginnings_outlive_ends() -> None:
    executor, cache = pair(kv_tokens=32)
    old, new = [3] * 9, [4] * 9
    run_through(executor, cache, old)
    run_through(executor, cache, new)
    run_through(executor, cache, [*old[:4], 9])
    assert cache.idle_pages == 4
    cache.make_room(5)  # one page has to go: the end of the older text
    assert run_through(executor, cache, old) == 4
    executor, cache = pair(kv_tokens=32)
    run_through(executor, cache, old)
    run_through(executor, cache, new)
    cache.make_room(6)
    assert cache.idle_pages == 2
    assert run_through(executor, cache, new) == 8


def test_who_keeps_most_gives_up_first() -> None:
    """A's many prompts push out A's own pages, and B's prompt is found however many there were."""
    executor, cache = pair(kv_tokens=32)
    text = [3] * 9
    run_through(executor, cache, text, "b/salt")
    for number in range(20):
        request = [4 + number] * 9
        cache.make_room(cache.pages_for(len(request)))
        run_through(executor, cache, request, f"a/{number}")
    assert run_through(executor, cache, text, "b/salt") == 8
    assert run_through(executor, cache, [23] * 9, "a/19") == 8, "what A used last is still there"
    cache.make_room(3)
    assert run_through(executor, cache, [4] * 9, "a/0") == 0


def test_without_caching_pages_are_free_at_once() -> None:
    executor, cache = pair(enabled=False)
    run_through(executor, cache, list(range(3, 15)))
    assert run_through(executor, cache, list(range(3, 15))) == 0
    assert executor.free_tokens == executor.total_tokens


def test_who_needs_the_whole_prompt_gets_nothing_from_the_cache() -> None:
    executor, cache = pair()
    text = list(range(3, 15))
    run_through(executor, cache, text)
    assert cache.open(request_of(text, cached=False)) == 0


class Books(RuleBasedStateMachine):
    """Requests open, grow by trees of which a path is kept, close, and push pages out; few texts, so that they meet."""

    def __init__(self) -> None:
        super().__init__()
        self.executor, self.cache = pair(kv_tokens=80)
        self.open: list[Any] = []

    @precondition(lambda self: len(self.open) < 4)
    @rule(start=st.integers(0, 2), length=st.integers(1, 14), tenant=st.sampled_from("ab"))
    def start(self, start: int, length: int, tenant: str) -> None:
        request = request_of([3 + start] * length, tenant)
        if self.cache.pages_to_open(request) > self.cache.available_pages:
            return
        before = self.cache.available_pages
        needed = self.cache.pages_to_open(request)
        found = self.cache.open(request)
        assert found < length
        assert found % PAGE == 0
        assert [*self.executor._committed[request.seq]] == request.view.tokens[:found]
        self.cache.make_room(self.cache.pages_for(length) - found // PAGE)
        forward(self.executor, self.cache, request)
        assert self.cache.available_pages >= before - needed
        self.open.append(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.open), "request")
        count = data.draw(st.integers(1, 6), "rows")
        tokens = data.draw(st.lists(st.integers(3, 4), min_size=count, max_size=count), "tokens")
        parents = [data.draw(st.integers(COMMITTED, row - 1), "parent") for row in range(count)]
        self.cache.make_room(2)
        try:
            self.executor.forward([Segment(request.seq, tokens, parents)])
        except KVCacheFullError:
            return
        path, row = [], data.draw(st.integers(COMMITTED, count - 1), "last")
        while row != COMMITTED:
            path.insert(0, row)
            row = parents[row]
        self.executor.commit(request.seq, path)
        request.view.tokens.extend(tokens[row] for row in path)
        assert self.executor._committed[request.seq] == request.view.tokens, "nothing of a rejected row is left"
        self.cache.enter(request)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.open), "request")
        self.open.remove(request)
        self.cache.close(request)

    @rule(pages=st.integers(0, 20))
    def push_out(self, pages: int) -> None:
        available = self.cache.available_pages
        self.cache.make_room(pages)
        assert self.cache.available_pages == available, "room is made of what nobody uses"
        assert self.executor.free_tokens // PAGE >= min(pages, available)

    @invariant()
    def consistent(self) -> None:
        self.cache.check_integrity()
        held = {page for request in self.open for page in self.executor._pages[request.seq]}
        assert self.cache.used_tokens == len(held) * PAGE


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
