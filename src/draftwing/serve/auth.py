"""What stands in front of the app: API keys, the size of bodies, and who is let in while the server shuts down."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.serve.errors import Refusal, reply


class Guard:
    """An ASGI middleware. Keys guard what lies below ``/v1`` and ``/inspector``, and whatever is not read; health,
    metrics and the page are open.

    Args:
        app: what is guarded.
        api_keys: any of which is good; none: all are let in.
        max_body: bytes.
        patience: seconds for a body to come.
        hosts: names by which the server may be asked for; none: any. A server for this machine alone must not answer
            a page from elsewhere whose name was made to mean this machine.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body: int,
        api_keys: Sequence[str] = (),
        hosts: Sequence[str] = (),
        patience: float = 60,
    ) -> None:
        self._app, self._max_body, self._patience, self._hosts = app, max_body, patience, frozenset(hosts)
        self._keys = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            reads = scope["method"] in ("GET", "HEAD", "OPTIONS")
            self._check_host(headers.get("host", ""))
            if self._keys and (scope["path"].startswith(("/v1", "/inspector")) or not reads):
                self._check_key(headers.get("authorization", ""))
            body = _Body(receive, self._max_body, headers.get("content-length"))
            if not reads:
                async with asyncio.timeout(self._patience):
                    await body.read()
        except TimeoutError:
            await reply(Refusal(408, "the body did not come in time: send it at once"))(scope, receive, send)
            return
        except Refusal as refusal:
            await reply(refusal)(scope, receive, send)
            return
        await self._app(scope, body.give, send)

    def _check_host(self, given: str) -> None:
        name = given.rsplit(":", 1)[0] if not given.endswith("]") else given
        if self._hosts and name.strip("[]").lower() not in self._hosts:
            raise Refusal(403, "this server answers this machine alone: ask for localhost, or start it with --host")

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
