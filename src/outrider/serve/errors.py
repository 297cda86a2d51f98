"""Errors as OpenAI's clients expect them, and nothing of a traceback in any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from outrider.core.errors import ContextLengthError, OutriderError, UsageError

NO_RETRY = {"x-should-retry": "false"}
"""Header by which OpenAI's clients are told that a repetition would fare no better."""


class APIError(Exception):
    """An answer that is an error: HTTP status, and the fields of OpenAI's error object.

    param: the field of the request that is at fault. code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object that clients get."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def engine_failed(why: str | None = None) -> APIError:
    """A request could not be answered. why: in the engine's own words; None: the reason is for the log alone."""
    message = (
        f"the request could not go on: {why}" if why else "the engine failed on this request; it may be sent again"
    )
    return APIError(500, message, kind="server_error")


def impossible(why: str) -> APIError:
    """What a request asks for leaves nothing to answer with."""
    return APIError(400, f"the request could not go on: {why}", code="invalid_value")


def timed_out(seconds: float) -> APIError:
    message = f"the request took more than the {seconds:g} seconds that this server allows"
    return APIError(504, message, kind="timeout_error", code="timeout", headers=NO_RETRY)


def too_many(why: str) -> APIError:
    """There is no room for a request now."""
    headers = {"Retry-After": "1"}
    return APIError(
        429, f"{why}; try again later", kind="rate_limit_error", code="rate_limit_exceeded", headers=headers
    )


def draining() -> APIError:
    message = "the server is shutting down and takes no new requests"
    return APIError(
        503, message, kind="server_error", code="draining", headers={"Retry-After": "5", "Connection": "close"}
    )


def from_outrider(error: OutriderError) -> APIError:
    """What the engine said about a request. Its messages are one line and name the parameter they are about."""
    if not isinstance(error, UsageError):
        return engine_failed()
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
    return APIError(400, str(error), code=code)


def from_validation(error: ValidationError) -> APIError:
    """What is wrong with a request's body, and the field it is in.

    Of the errors that a field with several forms has, one of our own words comes first, then the one found deepest,
    which is about the form that was meant, and then one about a value rather than its type.
    """
    found = error.errors(include_url=False, include_input=False)
    here = [entry for entry in found if entry["loc"][:1] == found[0]["loc"][:1]]
    best = max(here, key=_tells_most)
    path = [str(part) for part in best["loc"] if not _is_union_tag(part)]
    if best["type"] == "outrider":
        context = best["ctx"]
        return APIError(400, context["why"], param=context["param"] or ".".join(path) or None, code="invalid_value")
    param = path[0] if path else None
    if len({entry["loc"] for entry in here if len(entry["loc"]) == len(best["loc"])}) > 1 and len(path) == 1:
        return APIError(400, f"{param} has none of the forms it may have", param=param, code="invalid_value")
    code = "missing_required_parameter" if best["type"] == "missing" else "invalid_value"
    return APIError(400, f"{'.'.join(path) or 'the body'}: {best['msg']}", param=param, code=code)


def _tells_most(entry: Mapping[str, Any]) -> tuple[bool, int, bool]:
    return entry["type"] == "outrider", len(entry["loc"]), not entry["type"].endswith("_type")


def _is_union_tag(part: str | int) -> bool:
    """Whether a part of an error's place names a form that was tried, rather than a field."""
    return isinstance(part, str) and (part in ("str", "int", "bool") or not part.isidentifier())


def install_handlers(app: FastAPI) -> None:
    """Let every error of the application leave it in OpenAI's form."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, APIError)
        return error.response()

    async def on_usage_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OutriderError)
        return from_outrider(error).response()

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        what = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} has no {request.method}"}
        message = what.get(error.status_code, str(error.detail))
        return APIError(error.status_code, message, code="not_found", headers=error.headers).response()

    async def on_anything(_: Request, __: Exception) -> JSONResponse:
        return APIError(500, "the server failed on this request", kind="server_error").response()

    app.add_exception_handler(APIError, on_api_error)
    app.add_exception_handler(OutriderError, on_usage_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_anything)
