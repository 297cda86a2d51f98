"""Automatic prefix caching: full KV pages of earlier requests, found again by the text that they stand for.

A page is named by a digest of its tokens and of the page before it; the first of a chain is salted by the tenant, so
that nobody can tell from the clock what another tenant has sent. The executor counts references; which text a page
stands for, and which page has to go when memory runs short, is decided here: one of the owner that keeps most of them,
so that nobody can push out another's pages by sending more prompts. What running requests hold is not shared out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.core.tenants import FairOrder, owner_of

if TYPE_CHECKING:
    from outrider.engine.request import Request
    from outrider.executors.base import Executor

_DIGEST_BYTES = 32


@dataclass
class _Page:
    """A page that may be found again. users: open sequences that read it; without one it may be given up."""

    number: int
    users: int = 0


class PrefixCache:
    """Opens and closes the engine's sequences. One for each executor, whatever the number of engines over it.

    enabled: False to share nothing; sequences are then opened empty, and their pages are free when they are closed.
    """

    def __init__(self, executor: Executor, *, enabled: bool = True) -> None:
        self._executor = executor
        self._enabled = enabled
        self._pages: dict[bytes, _Page] = {}
        # Pages without a user.
        self._idle: FairOrder[bytes] = FairOrder()
        self._held: dict[int, list[bytes]] = {}

    @property
    def idle_pages(self) -> int:
        """Pages that nothing but this cache holds, and that `make_room` can free."""
        return len(self._idle)

    @property
    def available_pages(self) -> int:
        """Pages that sequences can still take: the free ones and the idle ones."""
        return self._executor.free_tokens // self._executor.page_size + len(self._idle)

    @property
    def used_tokens(self) -> int:
        """Tokens of KV memory that open sequences hold, in whole pages."""
        return self._executor.total_tokens - self.available_pages * self._executor.page_size

    def pages_to_open(self, request: Request) -> int:
        """Pages that become unavailable when the request is opened and all its tokens are forwarded."""
        hits = self._hits(request)
        return self.pages_for(len(request.view.tokens)) - len(hits) + sum(not self._pages[key].users for key in hits)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold that many tokens."""
        return -(-tokens // self._executor.page_size)

    def open(self, request: Request) -> int:
        """Open the request's sequence over the longest cached prefix of its text; returns the tokens found.

        The last token is never taken from the cache: its logits are needed.
        """
        hits = self._hits(request)
        request.seq = self._executor.open([self._pages[key].number for key in hits])
        for key in hits:
            self._pages[key].users += 1
            self._idle.discard(key)
        self._held[request.seq] = hits
        request.entered_pages = len(hits)
        return len(hits) * self._executor.page_size

    def enter(self, request: Request) -> None:
        """Make the pages that the request has filled since the last call known to others.

        A page whose text is known already stays the request's own, and is freed with it. So does one that holds tokens
        which were accepted behind a stop, and are not of the text.
        """
        assert request.seq is not None
        held = self._held[request.seq]
        length = min(self._executor.length(request.seq), len(request.view.tokens))
        filled = length // self._executor.page_size
        if not self._enabled or filled <= request.entered_pages:
            return
        numbers = self._executor.full_pages(request.seq)[:filled]
        for key, number in list(zip(self._digests(request, filled), numbers, strict=True))[request.entered_pages :]:
            if key not in self._pages:
                self._executor.retain([number])
                self._pages[key] = _Page(number, users=1)
                held.append(key)
        request.entered_pages = filled

    def close(self, request: Request) -> None:
        """Close the request's sequence. What it has entered stays, as long as there is room."""
        assert request.seq is not None
        # The end of a text is of no use without its beginning, so it is given up first.
        for key in reversed(self._held.pop(request.seq)):
            page = self._pages[key]
            page.users -= 1
            if not page.users:
                self._idle.put(key, owner_of(request.view.tenant))
        self._executor.close(request.seq)
        request.seq = None
        request.entered_pages = 0

    def make_room(self, pages: int) -> None:
        """Give up idle pages until that many are free or none is left to give up: by `FairOrder`, so that first goes
        what the owner of most of them used least recently.
        """
        missing = pages - self._executor.free_tokens // self._executor.page_size
        for _ in range(min(missing, len(self._idle))):
            key = self._idle.first()
            self._idle.discard(key)
            self._executor.release([self._pages.pop(key).number])

    def clear(self) -> None:
        """Forget every page that no open sequence reads."""
        self.make_room(self._executor.total_tokens)

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not agree with themselves or with the executor. For tests."""
        users = dict.fromkeys(self._pages, 0)
        for held in self._held.values():
            for key in held:
                users[key] += 1
        assert users == {key: page.users for key, page in self._pages.items()}, "users are counted wrongly"
        idle = {key for key, count in users.items() if not count}
        assert len(self._idle) == len(idle), "idle pages are listed wrongly"
        assert all(key in self._idle for key in idle), "an idle page is not listed"
        numbers = [page.number for page in self._pages.values()]
        assert len(set(numbers)) == len(numbers), "a page stands for two texts"
        self._executor.check_integrity()

    def _hits(self, request: Request) -> list[bytes]:
        if not self._enabled or not request.may_start_cached:
            return []
        hits: list[bytes] = []
        for key in self._digests(request, (len(request.view.tokens) - 1) // self._executor.page_size):
            if key not in self._pages:
                break
            hits.append(key)
        return hits

    def _digests(self, request: Request, pages: int) -> Sequence[bytes]:
        """Names of the first ``pages`` pages of the request's text; computed once."""
        known, size = request.page_digests, self._executor.page_size
        for start in range(len(known) * size, pages * size, size):
            before = known[-1] if known else _salt(request.view.tenant)
            known.append(_digest(before, array("q", request.view.tokens[start : start + size]).tobytes()))
        return known[:pages]


def _salt(tenant: str) -> bytes:
    return hashlib.blake2b(
        tenant.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES, person=b"tenant"
    ).digest()


def _digest(before: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(before + tokens, digest_size=_DIGEST_BYTES, person=b"page").digest()
