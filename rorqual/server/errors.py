"""What goes wrong, as clients read it: {"error": {"message", "type", "param", "code"}}, whatever the fault."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from rorqual.server.engine_client import EngineDead, RequestRefused

log = logging.getLogger("rorqual.server")

RETRY_AFTER_S = 5


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    """"invalid_request_error" and the like."""
    param: str | None = None
    """The field at fault, as "messages.0.role"."""
    code: str | int | None = None
    """For programs, as "context_length_exceeded"."""


class ErrorResponse(BaseModel):
    """The body of every answer whose status is 400 or above."""

    error: ErrorDetail


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_MEANINGS = {
    400: "A value, a parameter or the JSON is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, or no such path.",
    405: "This path knows other methods.",
    408: "The body did not come in time.",
    413: "The body is larger than the server takes.",
    429: "There are too many requests.",
    500: "The request failed in the server.",
    503: "The server is loading, full, draining, or its engine is gone; see Retry-After.",
    504: "The request took longer than the server allows.",
}
DECLARED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": meaning} for status, meaning in _MEANINGS.items()
}
"""For `responses=` of every route."""


class APIError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = message.encode(errors="backslashreplace").decode()  # a client may send half of a surrogate pair
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        if status == 503:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))
        self.body = ErrorResponse(
            error=ErrorDetail(message=message, type=_TYPES.get(status, "server_error"), param=param, code=code)
        )

    def response(self) -> Response:
        """As an HTTP answer."""
        return Response(
            self.body.model_dump_json(), status_code=self.status, headers=self.headers, media_type="application/json"
        )


def bad_value(message: str, *, param: str | None = None, code: str | None = None) -> APIError:
    """400."""
    return APIError(400, message, param=param, code=code)


form_asked_as: ContextVar[str] = ContextVar("form_asked_as", default="structured_outputs")
"""The field in which the request that is being answered asks for a form: the engine knows its own name for it alone."""


def as_api_error(error: Exception) -> APIError:
    """What a client is told of any exception; the unexpected ones are logged."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestRefused):
        message, name = str(error), form_asked_as.get()
        if message.startswith("structured_outputs:"):
            return bad_value(name + message.removeprefix("structured_outputs"), param=name)
        return bad_value(message)
    if isinstance(error, EngineDead):
        return APIError(503, f"the engine is not there: {error}", code="engine_dead")
    if isinstance(error, TimeoutError):
        return APIError(504, "the request took longer than the server allows", code="timeout")
    log.error("a request failed", exc_info=error)
    return APIError(500, "the request failed in the server; its log says why", code="internal_error")


def _validation_error(request: Request, error: RequestValidationError) -> APIError:
    """The first fault in a body, in one sentence, with the path of its field."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in _without_choices(first["loc"][1:]))
    if first["type"] == "json_invalid":
        return bad_value(f"the body must be valid JSON, got an error at character {path}: {first['ctx']['error']}")
    if not path:
        if first["type"] == "missing":
            return bad_value("the body must be a JSON object, got none")
        content_type = request.headers.get("content-type", "")
        if "json" not in content_type:
            got = content_type or "no Content-Type"
            return bad_value(f"the body must be JSON with the header Content-Type: application/json, got {got}")
        return bad_value(f"the body must be a JSON object, got {type(first.get('input')).__name__}")
    if first["type"] == "missing":
        return bad_value(f"{path} is required", param=path)
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message.replace("Input should be", "must be", 1)
    shown = repr(first.get("input"))
    shown = shown if len(shown) <= 100 else f"{shown[:99]}…"
    return bad_value(f"{path} {message}, got {shown}", param=path)


def _without_choices(location: Sequence[int | str]) -> list[int | str]:
    """A field's path without pydantic's names for the members of unions, as "list[str]" or "ChatMessage"."""
    return [
        part
        for part in location
        if isinstance(part, int)
        or not (part in ("str", "int", "float", "bool", "dict") or part[:1].isupper() or "[" in part)
    ]


def install(app: FastAPI) -> None:
    """Give every fault of the app this shape."""

    async def api_error(_request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation_error(request, error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {
            404: f"there is no path {request.url.path}: /openapi.json lists all",
            405: f"{request.url.path} does not know the method {request.method}",
        }
        message = said.get(error.status_code, str(error.detail))
        return APIError(error.status_code, message, headers=error.headers).response()

    for kind in (APIError, EngineDead, RequestRefused, TimeoutError):
        app.add_exception_handler(kind, api_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, api_error)
