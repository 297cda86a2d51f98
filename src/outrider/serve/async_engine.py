"""The engine behind an event loop: one thread runs rounds, and everything that touches the engine happens there.

The loop hands over commands, which the thread carries out between two rounds; the thread hands back what a round added,
in one call for the whole batch. With nothing to do the thread sleeps until a command comes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.stats import EngineStats
from outrider.serve.engine_adapter import EngineAdapter
from outrider.serve.errors import APIError, engine_failed
from outrider.serve.generation import Generation, Piece

if TYPE_CHECKING:
    from outrider.engine.request import Request
    from outrider.serve.metrics import Metrics

log = logging.getLogger(__name__)

_FAILURES_TO_GIVE_UP = 10
"""More than the times that a client sends again, of its own accord, a request that breaks every round it is in."""

_EMPTY_ROUNDS_TO_FAIL = 100
_STATS_PATIENCE = 2.0
_LAST_ROUND = 20.0
"""Seconds that the round in progress is given to end when the server does."""


@dataclass
class _Ticket:
    """One answer in the engine's thread. started: whether the request has had a place in the batch."""

    generation: Generation
    index: int
    request: Request
    started: bool = False
    sent: int = 0

    def piece(self) -> Piece:
        """What was added since the last call, with its own copy of all that the engine goes on to change."""
        delta = self.request.take_delta()
        first, self.sent = self.sent, self.sent + len(delta.token_ids)
        return Piece(
            self.index,
            delta.text,
            delta.token_ids,
            self.request.timing.token_times[first : self.sent],
            (self.request.logprobs or [])[first : self.sent],
            delta.output,
        )


_Delivery = tuple[_Ticket, Piece]


class AsyncEngine:
    """Submits to the engine, and delivers what it answers, on the event loop that called `start`."""

    def __init__(self, adapter: EngineAdapter, metrics: Metrics) -> None:
        self._adapter = adapter
        self._metrics = metrics
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._closing = False
        self._tickets: dict[int, _Ticket] = {}
        self._failures = 0
        self._empty_rounds = 0
        self._open: set[Generation] = set()
        self._has_died = False
        self._stats = EngineStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.on_death: Callable[[], None] = lambda: None
        """Called on the loop when the engine has failed for good."""

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; to be called on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Abort what runs, and end the thread. A round that does not end is left to itself, and counts as a failure."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, _LAST_ROUND)
        if self._thread.is_alive():
            log.error("the engine's round has not ended in %.0f s; the server ends without it", _LAST_ROUND)
            self._dead()

    @property
    def alive(self) -> bool:
        """Whether the thread runs, and answers can be expected."""
        return self._thread.is_alive() and not self._has_died

    @property
    def in_flight(self) -> int:
        """Answers that wait or run."""
        return sum(generation.open for generation in self._open)

    def in_flight_for(self, key: str) -> int:
        """Those of one API key."""
        return sum(generation.open for generation in self._open if generation.key == key)

    def submit(self, requests: Iterable[Request], arrival: float, key: str) -> Generation:
        """Queue the requests of one HTTP request. Raises APIError (500) if the engine has failed for good."""
        if not self.alive:
            raise engine_failed()
        generation = Generation(list(requests), arrival, key, self._abort)
        self._open.add(generation)
        self._post(lambda: self._submit(generation))
        return generation

    def abort_all(self, reason: APIError) -> None:
        """Abort everything; clients are told ``reason``."""
        for generation in list(self._open):
            generation.abort(reason)

    async def stats(self) -> EngineStats:
        """The engine's counters, taken between two rounds; the last known ones if a round takes too long."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def take() -> None:
            self._stats = self._adapter.stats()
            loop.call_soon_threadsafe(done.set)

        if self.alive:
            self._post(take)
            try:
                await asyncio.wait_for(done.wait(), _STATS_PATIENCE)
            except TimeoutError:
                log.info("the engine is in a long round; its counters are those of the last scrape")
        return self._stats

    def _abort(self, generation: Generation) -> None:
        self._post(lambda: self._end([t for t in self._tickets.values() if t.generation is generation]))

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _deliver(self, deliveries: Iterable[_Delivery]) -> None:
        for ticket, piece in deliveries:
            generation = ticket.generation
            self._metrics.observe(ticket.request.id, piece, generation.arrival, started=ticket.started)
            generation.push(piece)
            if not generation.open:
                self._open.discard(generation)

    def _dead(self) -> None:
        self._has_died = True
        for generation in self._open:
            generation.fail()
        self._open.clear()
        self.on_death()

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException:
            log.exception("the engine has failed for good")
            self._call(self._dead)

    def _turn(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._tickets or self._closing)
            commands, self._inbox = self._inbox, []
            closing = self._closing
        for command in commands:
            command()
        if closing:
            self._end(list(self._tickets.values()))
            return False
        if self._tickets:
            self._round()
        return True

    def _submit(self, generation: Generation) -> None:
        for index, request in enumerate(generation.requests):
            self._adapter.submit(request)
            self._tickets[request.id] = _Ticket(generation, index, request)

    def _end(self, tickets: Iterable[_Ticket]) -> None:
        """Abort requests, which frees their place before the next round."""
        for ticket in tickets:
            self._adapter.abort(ticket.request)
        self._hand_over(tickets)

    def _round(self) -> None:
        began = time.perf_counter()
        try:
            stepped = {request.id for request in self._adapter.step()}
        except Exception:
            log.exception("a round failed, and the requests that were in it")
            self._fail([t for t in self._tickets.values() if self._adapter.has_started(t.request)])
            return
        for ticket in self._tickets.values():
            if not ticket.started and (self._adapter.has_started(ticket.request) or ticket.request.id in stepped):
                ticket.started = True
                self._metrics.count_started(ticket.generation.arrival, began)
        touched = [t for t in self._tickets.values() if t.request.id in stepped or t.request.finished]
        broken = [t.request.error for t in touched if self._adapter.broke_down(t.request)]
        self._hand_over(touched)
        if broken:
            log.error("a round failed, and %d requests that were in it: %s", len(broken), broken[0])
            self._count_failure()
        else:
            self._watch(bool(stepped))

    def _watch(self, progress: bool) -> None:
        """Notice requests that the engine has lost, so that nobody waits for them for ever."""
        if progress or any(self._adapter.has_started(ticket.request) for ticket in self._tickets.values()):
            self._failures = self._empty_rounds = 0
            return
        self._empty_rounds += 1
        if self._tickets and self._empty_rounds >= _EMPTY_ROUNDS_TO_FAIL:
            log.error("the engine runs none of %d requests; they end here", len(self._tickets))
            self._fail([])

    def _fail(self, tickets: list[_Ticket]) -> None:
        """End requests because their round failed; all of them if none is known to have been in it."""
        tickets = tickets or list(self._tickets.values())
        self._empty_rounds = 0
        for ticket in tickets:
            self._adapter.abort(ticket.request)
        self._hand_over(tickets, failed=True)
        self._count_failure()

    def _count_failure(self) -> None:
        self._failures += 1
        if self._failures >= _FAILURES_TO_GIVE_UP:
            raise RuntimeError(f"{self._failures} rounds in a row have failed")

    def _hand_over(self, tickets: Iterable[_Ticket], *, failed: bool = False) -> None:
        deliveries: list[_Delivery] = []
        for ticket in tickets:
            piece = Piece(ticket.index, failed=True) if failed else ticket.piece()
            if piece.last:
                del self._tickets[ticket.request.id]
            deliveries.append((ticket, piece))
        if deliveries:
            self._call(lambda: self._deliver(deliveries))

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: there is nobody left to tell
            log.info("the event loop has ended before the engine")
