"""The process: uvicorn, signals, and an end that leaves nobody hanging."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from outrider.serve.app import create_app
from outrider.serve.auth import load_keys
from outrider.serve.config import ServerConfig
from outrider.serve.errors import draining

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

log = logging.getLogger(__name__)

EXIT_FAILURE = 1

_POLL = 0.05
_LAST_WORDS = 5
"""Seconds that connections are given to read what was sent to them."""


class Server(uvicorn.Server):
    """uvicorn's server, with a drain in front of its shutdown.

    The first SIGTERM or SIGINT refuses new requests with 503 and waits for the running ones, the drain timeout at most;
    a second one does not wait. exit_code: not 0 if requests had to be given up, or the engine failed.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self._app = create_app(llm, config)
        self._service = self._app.state.service
        self._service.engine.on_death = self._on_death
        self._settings = config
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0
        super().__init__(
            uvicorn.Config(
                self._app,
                host=config.host,
                port=config.port,
                log_level="info" if config.access_log else "warning",
                access_log=config.access_log,
                server_header=False,
                timeout_graceful_shutdown=_LAST_WORDS,
            )
        )

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        await super().startup()
        if self.started:
            for address in (sock.getsockname() for server in self.servers for sock in server.sockets):
                host = f"[{address[0]}]" if ":" in address[0] else address[0]
                names = ", ".join(self._service.names)
                print(f"outrider: {names} at http://{host}:{address[1]}/v1", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._draining is not None or self._service.draining:
            self.should_exit = self.force_exit = True
            self.exit_code = self.exit_code or 128 + sig
            return
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._start_drain, signal.Signals(sig).name)

    def _start_drain(self, name: str) -> None:
        self._draining = asyncio.create_task(self._drain(name))

    async def _drain(self, name: str) -> None:
        engine = self._service.engine
        print(f"outrider: {name}: finishing {engine.in_flight} answers", file=sys.stderr, flush=True)
        patience = self._settings.drain_timeout
        while engine.in_flight and patience > 0:
            await asyncio.sleep(_POLL)
            patience -= _POLL
        if engine.in_flight:
            print(f"outrider: giving up {engine.in_flight} answers", file=sys.stderr, flush=True)
            self.exit_code = EXIT_FAILURE
            engine.abort_all(draining())
        self.should_exit = True

    def _on_death(self) -> None:
        print("outrider: the engine has failed; the server ends", file=sys.stderr, flush=True)
        self.exit_code = EXIT_FAILURE
        self.should_exit = True


def serve(llm: LLM, config: ServerConfig) -> int:
    """Run until a signal ends it. Returns the exit code."""
    if not config.is_local and not load_keys(config):
        print(f"outrider: {config.host} can be reached by others, and no API key is set", file=sys.stderr)
    server = Server(llm, config)
    gc.collect()
    gc.freeze()  # what is loaded stays for good: collections, which stop all requests, need not look at it again
    try:
        server.run()
    finally:
        gc.unfreeze()
    return server.exit_code
