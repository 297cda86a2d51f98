"""From a generation to HTTP: a JSON answer or server-sent events; and an end to the work when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from outrider.serve.errors import APIError, timed_out
from outrider.serve.generation import ClientLeftError, Generation

if TYPE_CHECKING:
    from outrider.engine.outputs import RequestOutput
    from outrider.serve.generation import Piece
    from outrider.serve.writers import Writer

_DONE = b"data: [DONE]\n\n"
_CLIENT_LEFT = 499
"""nginx's status for a client that left; nobody sees it but a log."""


class Deadline:
    """The moment by which an HTTP request has to be through, on the clock of the event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Raises APIError (504) if the block is not through in time."""
        try:
            async with asyncio.timeout_at(self._at):
                yield
        except TimeoutError:
            raise timed_out(self.seconds) from None


@asynccontextmanager
async def _watched(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Abort the generation when the client leaves, and in any case when the block is left."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.abort()


async def respond(receive: Receive, generation: Generation, writer: Writer, deadline: Deadline) -> Response:
    """The whole answer, as JSON. Raises APIError."""
    try:
        async with _watched(receive, generation), deadline.enforced():
            outputs = await generation.outputs()
    except ClientLeftError:
        return Response(status_code=_CLIENT_LEFT)
    return JSONResponse(writer.whole(outputs))


class EventStream(Response):
    """The answer in pieces.

    The status line waits for the first piece: what fails before it is an HTTP error, what fails later an error event,
    which OpenAI's clients raise as well.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: Writer, deadline: Deadline) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._deadline = deadline
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _watched(receive, self._generation), self._deadline.enforced():
                await self._stream(send)
        except ClientLeftError:
            if not self._begun:
                await Response(status_code=_CLIENT_LEFT)(scope, receive, send)
        except APIError as error:
            if self._begun:
                await send(_body(_event(error.body()), more=False))
            else:
                await error.response()(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        outputs: dict[int, RequestOutput] = {}
        async for piece in self._generation.pieces():
            data = await self._begin(send) + self._events(piece)
            if piece.output is not None:
                outputs[piece.index] = piece.output
            if data:
                await send(_body(data))
        end = _DONE
        if self._writer.usage_in_stream:
            end = _event(self._writer.usage_chunk([outputs[index] for index in sorted(outputs)])) + end
        await send(_body(end, more=False))

    async def _begin(self, send: Send) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        return b"".join(map(_event, self._writer.begin(len(self._generation.requests))))

    def _events(self, piece: Piece) -> bytes:
        return b"".join(map(_event, self._writer.chunks(piece)))


def _event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
