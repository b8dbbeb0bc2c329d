"""The server: its routes, and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from draftwing import __version__
from draftwing.errors import ConfigError, shown
from draftwing.lm import LM
from draftwing.serve.auth import Guard
from draftwing.serve.convert import Defaults, parse_chat, parse_completion
from draftwing.serve.errors import Refusal, dumps, install_handlers
from draftwing.serve.inspector import install_inspector
from draftwing.serve.metrics import Metrics
from draftwing.serve.models import ChatBody, CompletionBody
from draftwing.serve.stream import ServedAnswer
from draftwing.worker import Worker

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Settings:
    names: tuple[str, ...]  # names of the model; the first one is shown, all are accepted
    max_batch: int = 8  # requests decoded at once
    max_waiting: int = 64  # requests beyond these that may wait
    max_body: int = 8 * 2**20  # bytes per request
    max_nodes: int = 64  # nodes of the largest tree that a request may choose
    # tokens of a chat answer if the request sets no limit; None is the rest of the context
    max_tokens: int | None = None
    api_keys: tuple[str, ...] = ()  # accepted keys; without any, no key is needed
    hosts: tuple[str, ...] = ()  # accepted host names; without any, all are
    kv_memory: int | None = None  # see ``LM.engine``


def make_app(lm: LM, settings: Settings) -> FastAPI:
    """Create an app that serves an ``LM``. ``app.state.worker`` decodes, and starts and stops with the app."""
    engine = lm.engine(max_batch=settings.max_batch, kv_memory=settings.kv_memory)
    defaults = Defaults.for_model(lm, engine, settings.max_tokens, settings.max_nodes)
    metrics = Metrics(settings.names[0])
    worker = Worker(
        engine,
        max_running=settings.max_batch,
        max_waiting=settings.max_waiting,
        on_step=lambda step, tickets: metrics.add_step(step, tickets, time.monotonic()),
        on_end=lambda ticket: metrics.add_end(ticket, time.monotonic()),
    )
    metrics.watch(engine)
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await run_in_threadpool(worker.stop)

    app = FastAPI(title="Draftwing", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.worker = worker
    install_handlers(app)
    guard: Any = {"api_keys": settings.api_keys, "max_body": settings.max_body, "hosts": settings.hosts}
    app.add_middleware(Guard, accept=worker.accept, **guard)

    def check_model(name: str | None) -> None:
        if name is not None and name not in settings.names:
            names = ", ".join(settings.names)
            raise Refusal(404, f"there is no model {shown(name)} here: choose {names}", "model", "model_not_found")

    async def answer(request: Request, body: Any) -> Response:
        check_model(body.model)
        parse: Any = parse_chat if isinstance(body, ChatBody) else parse_completion
        parsed = await run_in_threadpool(parse, body, lm, defaults)
        result = ServedAnswer(worker, lm, body, parsed, body.model or settings.names[0])
        if body.stream:
            return StreamingResponse(result.stream(), media_type="text/event-stream", headers=_STREAM_HEADERS)
        answering = asyncio.ensure_future(result.whole())
        leaving = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise Refusal(499, "the client disconnected before the answer was finished")
            return Response(answering.result(), media_type="application/json")
        finally:
            answering.cancel()
            leaving.cancel()
            result.close()

    answers = _responses(400, 401, 403, 404, 408, 413, 429, 500, 503)
    event = {"type": "object", "properties": {"data": {"type": "string"}}}
    answers[200]["content"]["text/event-stream"] = {"schema": event}

    @app.post("/v1/chat/completions", response_class=Response, responses=answers)
    async def chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        return await answer(request, body)

    @app.post("/v1/completions", response_class=Response, responses=answers)
    async def complete(request: Request, body: CompletionBody) -> Response:
        """Continue a text."""
        return await answer(request, body)

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "draftwing",
            "max_model_len": lm.target.max_length,
            "draftwing": {"target": lm.target.name, "draft": lm.drafter_name, "tree": lm.describe_budget()},
        }

    @app.get("/v1/models", response_class=Response, responses=_responses(401))
    async def list_models() -> Response:
        """List the served model under each of its names."""
        cards = [card(name) for name in settings.names]
        return Response(dumps({"object": "list", "data": cards}), media_type="application/json")

    @app.get("/v1/models/{name:path}", response_class=Response, responses=_responses(401, 404))
    async def get_model(name: str) -> Response:
        """Describe the model."""
        check_model(name)
        return Response(dumps(card(name)), media_type="application/json")

    @app.get("/health", response_class=Response, responses=_responses(503))
    async def health() -> Response:
        """Report whether the server accepts requests."""
        is_running = worker.state == "running"
        status = {"status": "ok" if is_running else worker.state, "open_requests": worker.num_accepted}
        if worker.error is not None:
            status["error"] = str(worker.error)
        return Response(dumps(status), 200 if is_running else 503, media_type="application/json")

    @app.get("/metrics", response_class=Response, responses=_responses(kind="text/plain"))
    async def get_metrics() -> Response:
        """Report metrics for Prometheus."""
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    install_inspector(app, lm, settings.names[0], defaults, needs_key=bool(settings.api_keys))
    return app


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_NULLABLE = {"type": ["string", "null"]}
_ERROR_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _NULLABLE, "code": _NULLABLE}
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": _ERROR_FIELDS, "required": list(_ERROR_FIELDS)}},
    "required": ["error"],
}


def _responses(*statuses: int, kind: str = "application/json") -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route for its OpenAPI description."""
    schema = {"type": "object" if kind == "application/json" else "string"}
    refused = {"description": "Refused.", "content": {"application/json": {"schema": _ERROR}}}
    return {
        200: {"description": "The answer.", "content": {kind: {"schema": schema}}},
        **dict.fromkeys(statuses, refused),
    }


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections, against clients that open many or send slowly."""

    header_timeout: float = 20.0  # seconds for the headers of a request to arrive
    max_connections: int = 512  # open at once, in addition to one for each request that may run or wait


class _Connection(HttpToolsProtocol):
    """A connection whose request headers must arrive in time.

    If there are too many connections, the one that has waited longest for its headers is closed.
    """

    def __init__(
        self, waiting: dict[_Connection, asyncio.TimerHandle], limits: ConnectionLimits, **options: Any
    ) -> None:
        super().__init__(**options)
        self._waiting, self._limits = waiting, limits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait()
        if len(self.connections) > self._limits.max_connections:
            oldest = next(iter(self._waiting))
            oldest._wait_no_more()
            oldest.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._wait_no_more()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self not in self._waiting:
            self._waiting[self] = self.loop.call_later(self._limits.header_timeout, self.transport.abort)

    def _wait_no_more(self) -> None:
        if timer := self._waiting.pop(self, None):
            timer.cancel()


class GracefulServer(uvicorn.Server):
    """Serves an app until the first signal, then answers the requests that it has accepted.

    It stops when all are answered or ``patience`` seconds have passed; what is unfinished then is cut off.
    """

    def __init__(
        self, app: FastAPI, *, patience: float = 30.0, limits: ConnectionLimits | None = None, log_level: str = "info"
    ) -> None:
        self._worker: Worker = app.state.worker
        limits = limits or ConnectionLimits()
        limits = replace(limits, max_connections=limits.max_connections + self._worker.max_open)
        protocol: Any = partial(_Connection, {}, limits)
        config = uvicorn.Config(
            app, http=protocol, log_level=log_level, timeout_graceful_shutdown=5, server_header=False
        )
        super().__init__(config)
        self._patience, self._deadline = patience, math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain; at the second signal, stop at once."""
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self._patience
        else:
            self._deadline = 0.0
            self.force_exit = sig == signal.SIGINT

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen. Raises ConfigError if another program has begun to listen there since ``bind``."""
        for each in sockets or ():
            try:
                each.listen(self.config.backlog)  # uvloop would only log that it cannot
            except OSError as error:
                host, port, *_ = each.getsockname()
                raise _cannot_listen(host, port, error) from error
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop; called ten times a second."""
        if self._deadline < math.inf:
            self._worker.drain()
            if not self._worker.num_accepted or time.monotonic() > self._deadline:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End unfinished answers where they are."""
        if self._worker.num_accepted:
            self._worker.stop(timeout=0.0)
        await super().shutdown(sockets)


def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to every address of ``host``, which do not listen yet."""
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for number, (family, kind, protocol, _, address) in enumerate(found, 1):
            try:
                bound.append(_bound_socket(family, kind, protocol, address))
            except OSError as error:  # localhost may have an IPv6 address on a machine that does not use IPv6
                is_missing = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                if not is_missing or (number == len(found) and not bound):
                    raise
    except (OSError, UnicodeError) as error:
        for each in bound:
            each.close()
        raise _cannot_listen(host, port, error) from error
    return bound


def _bound_socket(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else 8000
        fix = f"port {port} is in use: end the other program, or choose another port, such as --port {other}"
    elif number == errno.EACCES:
        fix = f"port {port} is reserved: choose one from 1024 on, such as --port 8000"
    else:
        fix = f"this machine has no such address ({error}): use --host 127.0.0.1, or 0.0.0.0 for all addresses"
    return ConfigError(f"cannot listen at {shown(host)}: {fix}")


def run(app: FastAPI, sockets: list[socket.socket], *, patience: float) -> None:
    """Serve an app of ``make_app`` on sockets of ``bind`` until SIGTERM or Ctrl-C; see ``GracefulServer``."""
    GracefulServer(app, patience=patience).run(sockets)
