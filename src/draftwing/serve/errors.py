"""Errors as the OpenAI protocol has them: ``{"error": {"message", "type", "param", "code"}}`` and a status."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from draftwing.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    DraftwingError,
    PromptError,
    SamplingError,
    TokenizerError,
    shown,
)

_ASKERS_FAULT = (PromptError, SamplingError, ConfigError, TokenizerError)
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY_AFTER_S = 1


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: what is wrong, what was expected, how to fix it.
        param: the field that is to blame.
        code: for programs, such as ``model_not_found``.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """As it is sent."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def of_error(error: DraftwingError, param: str | None = None) -> Refusal:
    """An error of ours as what the client is told."""
    if isinstance(error, BusyError):
        return Refusal(429, str(error), code="too_many_requests")
    if isinstance(error, ClosedError):
        return Refusal(503, str(error), code="unavailable")
    return Refusal(400 if isinstance(error, _ASKERS_FAULT) else 500, str(error), param)


def dumps(value: Any) -> bytes:
    """JSON in UTF-8; half of a surrogate pair, which UTF-8 cannot hold, as its escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def reply(refusal: Refusal) -> Response:
    """The response that says so."""
    headers = {}
    if refusal.status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(dumps(refusal.body), refusal.status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Have every error of an app answered in this shape."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return reply(error)

    @app.exception_handler(DraftwingError)
    async def ours(_: Request, error: DraftwingError) -> Response:
        return reply(of_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return reply(_of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        message = f"there is no {shown(where)} here" if error.status_code in (404, 405) else str(error.detail)
        response = reply(Refusal(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return reply(Refusal(500, f"the server failed at this request: {type(error).__name__}"))


def _of_validation(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    first = errors[0]
    where = [str(part) for part in first.get("loc", ()) if part != "body"]
    # Of a field that may have several forms, the names of the forms are in between: not for users.
    param = ".".join(
        part for part in where if not part.startswith(("list[", "function-", "constrained-", "literal[", "bool"))
    )
    if first["type"] == "extra_forbidden":
        return Refusal(400, f"unknown field {shown(param)}: leave it out, or see /docs for what there is", param)
    if first["type"] == "json_invalid":
        return Refusal(400, "the body is not JSON: send one JSON object")
    message = str(first.get("msg", "not valid")).removeprefix("Value error, ")
    return Refusal(400, f"{param}: {message}" if param else message, param or None)
