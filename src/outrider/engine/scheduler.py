"""The scheduler: which requests run, how many rows each of them has in a round, and who makes way when KV runs short.

A round has a budget of rows (`EngineConfig.max_batched_tokens`). Requests that decode come first, with their drafts;
what is left goes to prompts, in chunks that keep a round beside decoding requests short. KV memory is handed out as it
is needed: idle pages of the prefix cache go first, then draft rows, and only then a request has to wait: the newest of
the lowest priority. It keeps its tokens and its sampling state, and what it had in KV is computed again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.core.errors import KVCacheFullError
from outrider.engine.waiting import Waiting

if TYPE_CHECKING:
    from outrider.core.config import EngineConfig
    from outrider.engine.prefix_cache import PrefixCache
    from outrider.engine.request import Request
    from outrider.executors.base import Executor


class Scheduler:
    """Holds the requests that wait, and those that run: by priority, then in the order in which they were started."""

    def __init__(self, executor: Executor, cache: PrefixCache, config: EngineConfig) -> None:
        self._executor = executor
        self._cache = cache
        self._config = config
        self._page_size = executor.page_size
        self._waiting = Waiting()
        self._running: list[Request] = []
        self._turns = 0

    @property
    def waiting(self) -> Waiting:
        return self._waiting

    @property
    def running(self) -> Sequence[Request]:
        return self._running

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.add(request)

    def remove(self, request: Request) -> bool:
        """Take a request out, and free its KV. Returns whether it was there, waiting or running."""
        if self._waiting.remove(request):
            return True
        if request not in self._running:
            return False
        self._running.remove(request)
        self._cache.close(request)
        return True

    def unforwarded(self, request: Request) -> int:
        """Tokens of a running request that are not in the KV cache yet; the last one is the root."""
        assert request.seq is not None
        return len(request.view.tokens) - self._executor.length(request.seq)

    @property
    def filling(self) -> list[Request]:
        """Running requests whose prompt, or what was lost when they made way, is not all in the KV cache yet."""
        return [request for request in self._running if self.unforwarded(request) > 1]

    # -- who runs ------------------------------------------------------------------------------------------------------

    def admit(self) -> list[Request]:
        """Start waiting requests, in the order of `Waiting`, while batch and KV have room for all their tokens so far.

        None overtakes the next in line, so that a long prompt is not kept waiting by short ones for ever. Every request
        that runs is left a page to go on with, or the new one would soon have to make way again.
        """
        started: list[Request] = []
        while (request := self._waiting.first) and len(self._running) < self._config.max_batch_size:
            promised = sum(self._missing_pages(r, self.unforwarded(r)) + 1 for r in self._running)
            if self._running and self._cache.pages_to_open(request) + promised > self._cache.available_pages:
                break
            found = self._cache.open(request)
            self._waiting.pop()
            request.admitted(found, self._turns)
            self._turns += 1
            insort(self._running, request, key=_rank)
            started.append(request)
        return started

    def secure_roots(self) -> tuple[list[Request], list[Request]]:
        """(requests that decode in this round, requests that have to make way for them and wait again).

        Afterwards there is KV for one row of each decoding request.
        """
        preempted: list[Request] = []
        while True:
            decoding = [request for request in self._running if self.unforwarded(request) == 1]
            if sum(self._missing_pages(request, 1) for request in decoding) <= self._cache.available_pages:
                return decoding, preempted
            preempted.append(self._preempt_last())

    def _preempt_last(self) -> Request:
        if len(self._running) == 1:
            # It fits by itself, or `Engine.new_request` would have refused it.
            raise KVCacheFullError("sequences that are not this engine's hold the pages that its only request needs")
        request = self._running.pop()
        self._cache.close(request)
        request.preemptions += 1
        self.submit(request)
        return request

    # -- how many rows -------------------------------------------------------------------------------------------------

    def chunks(self, rows: int, decoding: Sequence[Request]) -> tuple[dict[int, int], list[Request]]:
        """({request id: prompt rows in this round}, requests that had to make way), at most ``rows`` rows in all.

        decoding: requests that take part with a row each. Half of the rows go to the first request in order, which so
        never stands still; the rest to those with the fewest tokens left, so that no short prompt waits for a long one.
        """
        left = self._cache.available_pages - sum(self._missing_pages(request, 1) for request in decoding)
        preempted: list[Request] = []
        while True:
            filling = self.filling
            chunks = self._divide(filling, rows, left)
            if chunks or not filling or decoding:
                return chunks, preempted
            # All that run have part of a prompt, and none can go on: the last one gives its pages up.
            preempted.append(self._preempt_last())
            left = self._cache.available_pages

    def _divide(self, filling: Sequence[Request], rows: int, pages: int) -> dict[int, int]:
        chunks: dict[int, int] = {}
        shortest_first = sorted(filling, key=lambda request: (request.priority, self.unforwarded(request)))
        for share, order in ((max(rows // 2, 1), filling[:1]), (rows, shortest_first)):
            left = min(share, rows - sum(chunks.values()))
            for request in order:
                has = chunks.get(request.id, 0)
                size = min(has + left, self._config.prefill_chunk, self.unforwarded(request))
                held = self._missing_pages(request, has)
                size = min(size, self._spare_rows(request) + self._page_size * (held + pages))
                if size > has:
                    pages -= self._missing_pages(request, size) - held
                    chunks[request.id] = size
                    left -= size - has
        return chunks

    def fit_drafts(self, wanted: Sequence[tuple[Request, int, int]]) -> dict[int, int]:
        """{request id: draft nodes that there is KV for}. wanted: (request, rows above its draft, nodes) in order.

        Drafts never take the pages that prompts are still to fill.
        """
        rows = {request.id: above for request, above, _ in wanted}
        left = self._cache.available_pages - sum(
            self._missing_pages(request, max(rows.get(request.id, 0), self.unforwarded(request)))
            for request in self._running
        )
        left = max(left, 0)
        fits: dict[int, int] = {}
        for request, above, nodes in wanted:
            held = self._missing_pages(request, above)
            fits[request.id] = max(0, min(nodes, self._spare_rows(request) + (held + left) * self._page_size - above))
            left -= self._missing_pages(request, above + fits[request.id]) - held
        return fits

    def make_room(self, rows: Sequence[tuple[Request, int]]) -> None:
        """Free the pages that a round of these rows takes."""
        self._cache.make_room(sum(self._missing_pages(request, count) for request, count in rows))

    def _missing_pages(self, request: Request, rows: int) -> int:
        """Pages that a running request has to be given for that many more rows."""
        return max(0, -(-(rows - self._spare_rows(request)) // self._page_size))

    def _spare_rows(self, request: Request) -> int:
        """Rows that fit into the last page that the request holds."""
        assert request.seq is not None
        return -self._executor.length(request.seq) % self._page_size


def _rank(request: Request) -> tuple[int, int]:
    assert request.turn is not None
    return request.priority, request.turn
