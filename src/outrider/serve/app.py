"""The application: routes, error handlers, and the engine's thread for as long as it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from outrider import __version__
from outrider.serve import openapi, routes_generate, routes_info
from outrider.serve.config import ServerConfig
from outrider.serve.errors import install_handlers
from outrider.serve.service import Service

if TYPE_CHECKING:
    from outrider.engine.llm import LLM


def create_app(llm: LLM, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application that serves ``llm``, which nothing else may use meanwhile.

    ``app.state.service`` is its `Service`. Raises ConfigError for keys that cannot be read, and for a model without a
    tokenizer.
    """
    config = config or ServerConfig()
    service = Service(llm, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.close()
        service.close()

    # The pages that FastAPI could add load scripts from elsewhere.
    app = FastAPI(title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    install_handlers(app)
    app.include_router(routes_generate.router)
    app.include_router(routes_info.router)
    if config.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app
