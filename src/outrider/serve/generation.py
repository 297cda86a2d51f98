"""The answers to one HTTP request, as they come out of the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.serve.engine_adapter import is_internal
from outrider.serve.errors import engine_failed, impossible

if TYPE_CHECKING:
    from outrider.engine.outputs import RequestOutput, TokenLogprob
    from outrider.engine.request import Request


class ClientLeftError(Exception):
    """The client has left; there is nobody to answer."""


@dataclass(frozen=True)
class Piece:
    """What one round added to one answer.

    index: which of the answers. text: may be empty. times: when each of token_ids was emitted (`time.perf_counter`).
    logprobs: of token_ids, if they were asked for.
    output: the whole answer, on its last piece. failed: the last piece too, of an answer that the engine failed on.
    """

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    times: Sequence[float] = ()
    logprobs: Sequence[TokenLogprob] = ()
    output: RequestOutput | None = None
    failed: bool = False

    @property
    def last(self) -> bool:
        return self.failed or self.output is not None


class Generation:
    """Belongs to the event loop. ``requests``: one an answer, in the order of the answers.

    arrival: when the HTTP request came, on the clock of `time.perf_counter`. key: the API key that it was sent with.
    """

    def __init__(
        self, requests: Sequence[Request], arrival: float, key: str, abort: Callable[[Generation], None]
    ) -> None:
        self.requests = requests
        self.arrival = arrival
        self.key = key
        self.open = len(requests)
        self._abort = abort
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        self._reason: Exception = ClientLeftError()

    def push(self, piece: Piece) -> None:
        """Hand over a piece."""
        self.open -= piece.last
        self._pieces.put_nowait(piece)

    def fail(self) -> None:
        """End what has not ended: the engine will not answer any more."""
        self.open = 0
        self._pieces.put_nowait(Piece(0, failed=True))

    def abort(self, reason: Exception | None = None) -> None:
        """End every answer before the next round. reason: what `pieces` raises; default: ClientLeftError."""
        if self.open:
            self._reason = reason or self._reason
            self._abort(self)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece, the last one of each answer included.

        Raises APIError if the engine failed on one of them or they were aborted for a reason, ClientLeftError if the
        client has left. The rest is aborted then.
        """
        left = len(self.requests)
        while left:
            piece = await self._pieces.get()
            if piece.failed:
                self.abort()
                raise engine_failed()
            output = piece.output
            if output is not None and output.finish_reason == "aborted":
                raise self._reason
            if output is not None and output.finish_reason == "error":
                self.abort()
                if output.impossible:
                    raise impossible(output.error or "")
                raise engine_failed(None if is_internal(output.error) else output.error)
            left -= piece.last
            yield piece

    async def outputs(self) -> list[RequestOutput]:
        """The whole answers. Raises as `pieces` does."""
        found: dict[int, RequestOutput] = {}
        async for piece in self.pieces():
            if piece.output is not None:
                found[piece.index] = piece.output
        return [found[index] for index in range(len(self.requests))]
