"""The checks in front of the app: shutdown, host names, API keys, and the size of bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.errors import ClosedError, shown
from draftwing.serve.errors import Refusal, refusal_for


class Guard:
    """An ASGI middleware. Keys protect ``/v1``, ``/inspector`` and all writes; health, metrics and the page are open.

    Args:
        max_body: bytes.
        accept: returns a context that counts a request which writes, or raises ClosedError.
        api_keys: the accepted keys; without any, no key is needed.
        hosts: the accepted host names; without any, all are. A server for this machine only must refuse requests from
            foreign web pages whose name resolves to it.
        patience: seconds for a body to arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body: int,
        accept: Callable[[], AbstractContextManager[None]] = nullcontext,
        api_keys: Sequence[str] = (),
        hosts: Sequence[str] = (),
        patience: float = 60,
    ) -> None:
        self._app, self._max_body, self._accept, self._patience = app, max_body, accept, patience
        self._hosts = frozenset(host.lower() for host in hosts)
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the app, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_read = scope["method"] in ("GET", "HEAD", "OPTIONS")
        with ExitStack() as stack:
            try:
                if not is_read:
                    stack.enter_context(self._accept())
            except ClosedError as error:
                await refusal_for(error).response(scope, receive, send)
                return
            await self._pass_on(scope, receive, send, is_read)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, is_read: bool) -> None:
        messages = list[Message]()
        try:
            self._check_headers(scope, is_read)
            size, more = 0, not is_read
            async with asyncio.timeout(self._patience):
                while more:
                    messages.append(message := await receive())
                    size += len(message.get("body", b""))
                    if size > self._max_body:
                        raise self._too_large
                    more = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            refusal = Refusal(408, "the body did not arrive in time: send it at once")
            await refusal.response(scope, receive, send)
            return
        except Refusal as refusal:
            await refusal.response(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    @property
    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._max_body:,} bytes: send less", code="body_too_large")

    def _check_headers(self, scope: Scope, is_read: bool) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if self._hosts and name.strip("[]").lower() not in self._hosts:
            raise Refusal(
                403,
                f"this server does not accept the host name {shown(name)}: use localhost, or start it with "
                f"--allowed-host NAME",
            )
        if self._keys and (scope["path"].startswith(("/v1", "/inspector")) or not is_read):
            self._check_key(headers.get("authorization", ""))
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._max_body):
            raise self._too_large

    def _check_key(self, authorization: str) -> None:
        """Compare with every key, in a time that does not depend on where they differ."""
        kind, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            raise Refusal(
                401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
