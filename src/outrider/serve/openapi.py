"""The description of the API. Bodies are read by hand, byte for byte, so FastAPI has to be told what they are."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from outrider import __version__
from outrider.serve.protocol.answers import ErrorAnswer
from outrider.serve.protocol.chat import ChatRequest
from outrider.serve.protocol.completions import CompletionRequest
from outrider.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest

_BODIES: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
_REFERENCE = "#/components/schemas/{model}"

_ERRORS = {
    400: "The request is wrong; the message says where",
    401: "The API key is missing or wrong",
    404: "No such model, or no such path",
    413: "The body is too large",
    415: "The body is not declared to be JSON",
    429: "The server is busy; Retry-After says when to come again",
    500: "The engine failed on this request",
    503: "The server is shutting down, or its engine has failed",
    504: "The request took too long",
}


def answers(answer: Any, *, streamed: bool = False) -> dict[str, Any]:
    """Keyword arguments of a route: the form of its answer, and of its errors."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer, "description": text} for status, text in _ERRORS.items()
    }
    responses[200] = {"model": answer, "description": "The answer"}
    if streamed:
        responses[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {"responses": responses}


def accepts(body: type[BaseModel]) -> dict[str, Any]:
    """Keyword arguments of a route: the form of the body that it reads."""
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title="Outrider", version=__version__, routes=app.routes)
        _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFERENCE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
