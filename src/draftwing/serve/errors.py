"""Errors in the OpenAI format: a status and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

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

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY_AFTER_S = 1


class Refusal(Exception):
    """An error response: a message, the field ``param`` with the problem, a ``code`` such as ``model_not_found``."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(_RETRY_AFTER_S)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(dumps(self.body), self.status, headers, "application/json")


def refusal_for(error: DraftwingError, param: str | None = None) -> Refusal:
    if isinstance(error, BusyError):
        return Refusal(429, str(error), code="too_many_requests")
    if isinstance(error, ClosedError):
        return Refusal(503, str(error), code="unavailable")
    is_request_invalid = isinstance(error, PromptError | SamplingError | ConfigError | TokenizerError)
    return Refusal(400 if is_request_invalid else 500, str(error), param)


def dumps(value: Any) -> bytes:
    """Encode as JSON in UTF-8; unpaired surrogates, which UTF-8 lacks, are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def install_handlers(app: FastAPI) -> None:
    """Return every error of an app in this format."""

    @app.exception_handler(Refusal)
    async def on_refusal(_: Request, error: Refusal) -> Response:
        return error.response

    @app.exception_handler(DraftwingError)
    async def on_draftwing_error(_: Request, error: DraftwingError) -> Response:
        return refusal_for(error).response

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        # For a field of several types there is an error of each: one about the value says more than "not a string".
        first = min(error.errors(), key=lambda each: each["type"].endswith(("_type", "literal_error")))
        # For fields of several types, pydantic puts the types' names into the path: leave them out.
        param = ".".join(
            name
            for name in map(str, first.get("loc", ()))
            if name != "body" and not name.startswith(("list[", "function-", "constrained-", "literal[", "bool"))
        )
        if first["type"] == "extra_forbidden":
            message = f"unknown field {shown(param)}: leave it out; /openapi.json lists all fields"
        elif first["type"] == "json_invalid":
            param, message = "", "the body is not JSON: send one JSON object"
        elif first["type"] == "missing" and not param:
            message = "the body is empty: send one JSON object"
        else:
            message = str(first.get("msg", "not valid")).removeprefix("Value error, ")
            message = f"{param}: {message}" if param else message
        return Refusal(400, message, param or None).response

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # the parser of JSON failed
            return Refusal(400, "the body cannot be read: send one JSON object that is not nested too deep").response
        if error.status_code not in (404, 405):
            return Refusal(error.status_code, str(error.detail)).response
        # The page is mounted at the root, so requests end there if the method of a route differs.
        path, methods = shown(request.url.path), set[str]()
        for route in app.routes:
            if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL:
                methods |= route.methods or set()
        if not methods:
            return Refusal(404, f"there is no {path} here: /openapi.json lists all paths").response
        allowed = ", ".join(sorted(methods))
        response = Refusal(405, f"{path} takes {allowed}, not {request.method}").response
        response.headers["Allow"] = allowed
        return response

    @app.exception_handler(Exception)
    async def on_failure(_: Request, error: Exception) -> Response:
        return Refusal(500, f"the server failed at this request: {type(error).__name__}").response
