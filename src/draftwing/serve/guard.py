"""What stands in front of the app: API keys, the size of bodies, and who is let in while the server shuts down."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.serve.refusal import Refusal, reply

__all__ = ["Guard"]


class Guard:
    """An ASGI middleware. It guards what lies below ``/v1`` and ``/inspector``; health, metrics and the page are open.

    Args:
        app: what is guarded.
        api_keys: any of which is good; none: all are let in.
        max_body: bytes.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str] = (), max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._keys = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self._keys and scope["path"].startswith(("/v1", "/inspector")):
                self._check_key(headers.get("authorization", ""))
            body = _Body(receive, self._max_body, headers.get("content-length"))
            if scope["method"] in ("POST", "PUT", "PATCH"):
                await body.read()
        except Refusal as refusal:
            await reply(refusal)(scope, receive, send)
            return
        await self._app(scope, body.give, send)

    def _check_key(self, given: str) -> None:
        """Each key is compared, and each comparison takes as long whatever differs."""
        kind, _, key = given.partition(" ")
        digest = _digest(key.strip().encode("utf-8", "replace"))
        good = [hmac.compare_digest(digest, known) for known in self._keys]
        if kind.lower() != "bearer" or not any(good):
            raise Refusal(
                401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )


class _Body:
    """A request's body, read as far as it may be."""

    def __init__(self, receive: Receive, most: int, length: str | None) -> None:
        self._receive, self._most, self._kept = receive, most, list[Message]()
        if length is not None and length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > most):
            raise self._too_large()

    async def read(self) -> None:
        """Read all of it."""
        size, more = 0, True
        while more:
            message = await self._receive()
            self._kept.append(message)
            size += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)
            if size > self._most:
                raise self._too_large()

    async def give(self) -> Message:
        """What was read, then what comes after it."""
        return self._kept.pop(0) if self._kept else await self._receive()

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._most:,} bytes: send less", code="body_too_large")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
