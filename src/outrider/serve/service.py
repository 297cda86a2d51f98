"""What the routes share: who may ask, for how much, and the way from a body to a running generation."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from outrider.serve.async_engine import AsyncEngine
from outrider.serve.auth import Keys, load_keys, tenant_of
from outrider.serve.engine_adapter import EngineAdapter
from outrider.serve.errors import APIError, draining, engine_failed, too_many
from outrider.serve.metrics import Metrics
from outrider.serve.protocol.base import Body, read
from outrider.serve.respond import Deadline

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.request import Request as EngineRequest
    from outrider.serve.config import ServerConfig
    from outrider.serve.generation import Generation
    from outrider.serve.protocol.sampling import SamplingFields

B = TypeVar("B", bound=Body)
T = TypeVar("T")

_SEEDS = 1 << 64
_COMPILERS = 4
_ENCODERS = 4
"""Threads that compile grammars, and that encode prompts."""
_PATIENCE_WITH_BODIES = 4
"""Times the limit that is read, and thrown away, of a body that is too large: most clients read no answer before."""


@dataclass(frozen=True)
class Call:
    """One HTTP request that may use the engine. arrival: on the clock of `time.perf_counter`."""

    key: str
    arrival: float
    deadline: Deadline


@dataclass(frozen=True)
class Work:
    """What a request comes down to. prompts: token ids. params: those of every answer, but for the seed."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams


class Service:
    """One model, one engine, one configuration."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.config = config
        self.adapter = EngineAdapter(llm)
        self.names = tuple(config.served_model_name) or (self.adapter.model_name,)
        self.created = int(time.time())
        self.metrics = Metrics({"model_name": self.names[0], **self.adapter.describe()})
        self.engine = AsyncEngine(self.adapter, self.metrics)
        self.draining = False
        self._preparing: Counter[str] = Counter()
        self._compilers = ThreadPoolExecutor(_COMPILERS, "compile")
        self._encoders = ThreadPoolExecutor(_ENCODERS, "encode")
        self._keys = Keys(load_keys(config))

    # -- before the body is read ---------------------------------------------------------------------------------------

    def check_key(self, http: Request) -> str:
        """The key that was sent. Raises APIError (401)."""
        return self._keys.check(http)

    def enter(self, http: Request) -> Call:
        """Let a request in. Raises APIError: 401 without a valid key, 503 while draining, 500 if the engine is dead."""
        key = self.check_key(http)
        if self.draining:
            raise draining()
        if not self.engine.alive:
            raise engine_failed()
        return Call(key, time.perf_counter(), Deadline(self.config.request_timeout))

    async def body(self, http: Request, cls: type[B], call: Call) -> B:
        """The body of a request. Raises APIError: 415, 413, 400, or 504 if it does not come in time."""
        # A web page may send other types across origins without being asked; it may not send this one.
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise APIError(415, "send the body with the header 'Content-Type: application/json'")
        async with call.deadline.enforced():
            data = await self._read(http)
        return read(cls, data)

    async def _read(self, http: Request) -> bytes:
        limit = self.config.max_body_bytes
        data = bytearray()
        size = 0
        try:
            async for chunk in http.stream():
                size += len(chunk)
                if size <= limit:
                    data += chunk
                elif size > _PATIENCE_WITH_BODIES * limit:
                    break
        except ClientDisconnect:
            raise APIError(400, "the body ended early") from None
        if size > limit:
            message = f"the body has more than the {limit} bytes allowed here"
            raise APIError(413, message, code="body_too_large", headers={"Connection": "close"})
        return bytes(data)

    # -- from a body to a generation -----------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Raises APIError (404) for a model that is not the one served here."""
        if name is not None and name not in self.names:
            message = f"there is no model {name[:200]!r} here; this server has {', '.join(self.names)}"
            raise APIError(404, message, param="model", code="model_not_found")

    def check_room(self, key: str, answers: int) -> None:
        """Raises APIError: 400 for more answers than one request may have, 429 while there is no room for them, in all
        or for this key.
        """
        if answers > self.config.max_choices:
            message = f"{answers} answers (prompts times n) are asked for, and {self.config.max_choices} allowed"
            raise APIError(400, message, param="n", code="invalid_value")
        own = self.engine.in_flight_for(key) + self._preparing[key]
        busy = self.engine.in_flight + self._preparing.total()
        limit = self.config.max_requests_per_key
        if limit is not None and own + answers > limit:
            raise too_many(f"this API key has {own} answers waiting or running, and {limit} are allowed")
        if busy + answers > self.config.max_concurrent_requests:
            raise too_many(f"the server is busy with {busy} answers")

    def priority_of(self, body: SamplingFields) -> int:
        """The priority that the body asks for; 0 if it asks for none. Raises APIError (400) for one that it must not
        have: a client may step back as far as it likes, and ahead of others only as far as the server lets it.
        """
        priority, least = body.priority or 0, self.config.min_priority
        if priority < least:
            message = f"priority {priority} is below the {least} that this server lets clients ask for"
            raise APIError(400, message, param="priority", code="invalid_value")
        return priority

    async def prepare(self, call: Call, make: Callable[[], T], *, answers: int = 0, compiles: bool = False) -> T:
        """What ``make`` gives, which takes its time, in another thread. Raises APIError (504) if it takes too long.

        A thread cannot be stopped: what comes too late is dropped, and the ``answers`` that it was for count as long as
        it runs. compiles: whether it may compile a grammar; those have threads of their own, so that however long they
        take, what has none does not wait for them.
        """
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop may have ended before the thread
                loop.call_soon_threadsafe(self._count_preparing, call.key, -answers)

        self._count_preparing(call.key, answers)
        working = (self._compilers if compiles else self._encoders).submit(make)
        working.add_done_callback(ended)
        async with call.deadline.enforced():
            return await asyncio.wrap_future(working)

    def _count_preparing(self, key: str, answers: int) -> None:
        self._preparing[key] += answers

    def close(self) -> None:
        """Let the threads end that make requests ready; what still waits for one is dropped."""
        for pool in (self._compilers, self._encoders):
            pool.shutdown(wait=False, cancel_futures=True)

    async def generate(self, body: SamplingFields, answers: int, work: Callable[[str], Work], call: Call) -> Generation:
        """Queue what ``work`` makes of the body for a tenant, in another thread: prompts encoded, grammars compiled.

        answers: prompts times n. Raises APIError or a UsageError.
        """
        self.check_model(body.model)
        self.check_room(call.key, answers)
        priority = self.priority_of(body)
        requests = await self.prepare(
            call,
            lambda: self._requests(body, work, call.key, priority),
            answers=answers,
            compiles=body.constrained,
        )
        if self.draining:
            raise draining()
        for request in requests[:: body.choices]:
            self.metrics.count_prompt(len(request.prompt))
        return self.engine.submit(requests, call.arrival, call.key)

    def _requests(
        self, body: SamplingFields, work: Callable[[str], Work], key: str, priority: int
    ) -> list[EngineRequest]:
        tenant = tenant_of(key, body.cache_salt)
        made = work(tenant)
        limit = self.config.max_prompt_tokens
        for prompt in made.prompts:
            if limit is not None and len(prompt) > limit:
                message = f"the prompt has {len(prompt)} tokens; at most {limit} are allowed here"
                raise APIError(400, message, param="prompt", code="context_length_exceeded")
        speculative = body.speculative.model_dump(exclude_none=True) if body.speculative else None
        return [
            self.adapter.new_request(
                prompt,
                params,
                tenant=tenant,
                client=tenant_of(key, None),
                priority=priority,
                speculative=speculative,
            )
            for prompt in made.prompts
            for params in seeded(made.params, body.seed, body.choices)
        ]


def seeded(params: SamplingParams, seed: int | None, choices: int) -> list[SamplingParams]:
    """Parameters of each answer to one prompt: the i-th has seed + i, so that each can be had again alone."""
    if seed is None:
        return [params] * choices
    return [replace(params, seed=(seed + index) % _SEEDS) for index in range(choices)]


def structure_of(given: Mapping[str, Any]) -> tuple[Any, str]:
    """The one structure among those that fields of a request ask for (None: it does not), and that field.

    Raises APIError (400) if there are several.
    """
    asked = {name: structure for name, structure in given.items() if structure is not None}
    if len(asked) > 1:
        raise APIError(400, f"{' and '.join(asked)} cannot be combined; send one of them", param=next(iter(asked)))
    for name, structure in asked.items():
        return structure, name
    return None, ""
