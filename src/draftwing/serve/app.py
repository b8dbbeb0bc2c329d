"""The app: which path does what."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from draftwing import __version__
from draftwing.errors import shown
from draftwing.lm import LM
from draftwing.serve import errors as refusal
from draftwing.serve.auth import Guard
from draftwing.serve.convert import Asked, Defaults, asked_of_chat, asked_of_completion
from draftwing.serve.errors import Refusal, dumps
from draftwing.serve.inspector import Inspector
from draftwing.serve.metrics import Metrics
from draftwing.serve.models import ChatBody, CompletionBody
from draftwing.serve.stream import Shape, Writing
from draftwing.serve.trace import Tracer
from draftwing.worker import Worker


@dataclass(frozen=True)
class Settings:
    """What a server is told.

    Attributes:
        names: of the model; the first one is shown, all are answered.
        max_batch: requests decoded at once.
        max_waiting: requests beyond these that may wait.
        max_body: bytes of a request.
        max_tokens: of an answer whose request does not say it; None for what is left of the context.
        api_keys: any of which is good.
        hosts: names by which it may be asked for; none: any.
        kv_memory: see ``LM.engine``.
    """

    names: tuple[str, ...]
    max_batch: int = 8
    max_waiting: int = 64
    max_body: int = 8 * 2**20
    max_tokens: int | None = None
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    kv_memory: int | None = None


class _Server:
    def __init__(self, lm: LM, settings: Settings) -> None:
        self.lm, self.settings, self.started = lm, settings, int(time.time())
        self.metrics = Metrics(settings.names[0])
        engine = lm.engine(max_batch=settings.max_batch, kv_memory=settings.kv_memory)
        self.defaults = Defaults.of(lm, engine, settings.max_tokens)
        self.worker = Worker(
            engine,
            max_running=settings.max_batch,
            max_waiting=settings.max_waiting,
            on_step=lambda step, tickets: self.metrics.step(step, tickets, time.monotonic()),
            on_end=lambda ticket: self.metrics.end(ticket, time.monotonic()),
        )
        self.metrics.watch(self.worker)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here; none is this one."""
        if name is not None and name not in self.settings.names:
            names = ", ".join(self.settings.names)
            raise Refusal(404, f"there is no model {shown(name)} here: choose {names}", "model", "model_not_found")

    def card(self, name: str) -> dict[str, Any]:
        """A model as ``/v1/models`` has it."""
        lm = self.lm
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "draftwing",
            "max_model_len": lm.target.max_length,
            "draftwing": {"target": lm.target.name, "draft": lm.drafter_name, "tree": lm.describe_budget()},
        }

    async def answer(
        self, request: Request, body: Any, read: Callable[[Any, LM, Defaults], Asked], *, is_chat: bool
    ) -> Response:
        """Carry a request out."""
        self.check_model(body.model)
        asked = await run_in_threadpool(read, body, self.lm, self.defaults)
        shape = Shape(body.model or self.settings.names[0], is_chat)
        writing = Writing(self.worker, self.lm, asked, shape, Tracer)
        if asked.stream:
            return StreamingResponse(_closing(writing), media_type="text/event-stream", headers=_STREAM)
        try:
            return Response(await _unless_gone(request, writing), media_type="application/json")
        finally:
            writing.close()


_STREAM = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _closing(writing: Writing) -> AsyncIterator[bytes]:
    try:
        async for event in writing.stream():
            yield event
    finally:
        writing.close()


async def _unless_gone(request: Request, writing: Writing) -> bytes:

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    wanted, left = asyncio.ensure_future(writing.whole()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((wanted, left), return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise Refusal(499, "the client went away before the answer was finished")
        return wanted.result()
    finally:
        wanted.cancel()
        left.cancel()


def make_app(lm: LM, settings: Settings) -> FastAPI:
    """An app that serves an ``LM``. Its worker starts and stops with it, and is ``app.state.worker``.

    Raises:
        ConfigError, SamplingError: settings that cannot be, or a generation_config.json with such.
    """
    server = _Server(lm, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        try:
            yield
        finally:
            await run_in_threadpool(server.worker.stop)

    app = FastAPI(title="Draftwing", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.worker, app.state.metrics = server.worker, server.metrics
    refusal.install(app)
    keys, hosts = settings.api_keys, settings.hosts
    app.add_middleware(Guard, api_keys=keys, max_body=settings.max_body, hosts=hosts)
    _add_answers(app, server)
    _add_rest(app, server)
    Inspector(lm, settings.names[0], server.defaults, needs_key=bool(settings.api_keys)).install(app)
    return app


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def _responses(*statuses: int, kind: str = "application/json") -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {kind: {"schema": {"type": "object" if kind == "application/json" else "string"}}}
    found: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    for status in statuses:
        found[status] = {"description": "Refused.", "content": {"application/json": {"schema": _ERROR}}}
    return found


def _add_answers(app: FastAPI, server: _Server) -> None:
    found = _responses(400, 401, 403, 404, 408, 413, 429, 500, 503)
    event = {"type": "object", "properties": {"data": {"type": "string"}}}
    found[200]["content"]["text/event-stream"] = {"schema": event}

    @app.post("/v1/chat/completions", response_class=Response, responses=found)
    async def chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        return await server.answer(request, body, asked_of_chat, is_chat=True)

    @app.post("/v1/completions", response_class=Response, responses=found)
    async def complete(request: Request, body: CompletionBody) -> Response:
        """Go on with a text."""
        return await server.answer(request, body, asked_of_completion, is_chat=False)


def _add_rest(app: FastAPI, server: _Server) -> None:

    @app.get("/v1/models", response_class=Response, responses=_responses(401))
    async def models() -> Response:
        """The model that is served, by each of its names."""
        cards: Sequence[dict[str, Any]] = [server.card(name) for name in server.settings.names]
        return Response(dumps({"object": "list", "data": cards}), media_type="application/json")

    @app.get("/v1/models/{name:path}", response_class=Response, responses=_responses(401, 404))
    async def model(name: str) -> Response:
        """The model by its name."""
        server.check_model(name)
        return Response(dumps(server.card(name)), media_type="application/json")

    @app.get("/health", response_class=Response, responses=_responses(503))
    async def health() -> Response:
        """Whether requests are taken."""
        worker = server.worker
        found = {"status": "ok" if worker.state == "running" else worker.state, "open_requests": worker.num_open}
        if worker.error is not None:
            found["error"] = str(worker.error)
        return Response(dumps(found), 200 if worker.state == "running" else 503, media_type="application/json")

    @app.get("/metrics", response_class=Response, responses=_responses(kind="text/plain"))
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(generate_latest(server.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


# Runs an app until it is told to stop: what is under way is finished, what is new is refused.


class _Server_run(uvicorn.Server):
    """Ends gracefully: at the first signal the worker drains, and once it has, or time is up, the server stops."""

    def __init__(self, config: uvicorn.Config, worker: Worker, patience: float) -> None:
        super().__init__(config)
        self._worker, self._patience, self._until = worker, patience, float("inf")
        self._is_told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; another one stops at once."""
        if self._is_told:
            self._until = 0.0
            self.force_exit = sig == signal.SIGINT
        else:
            self._is_told, self._until = True, time.monotonic() + self._patience

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop."""
        if self._is_told:
            self._worker.drain()
            if not self._worker.num_open or time.monotonic() > self._until:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Whoever is still waiting for an answer gets what there is."""
        if self._worker.num_open:
            self._worker.stop(timeout=0.0)
        await super().shutdown(sockets)  # type: ignore[arg-type]


def run(app: FastAPI, *, host: str, port: int, patience: float = 30.0, log_level: str = "info") -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        app: from ``make_app``.
        host, port: to listen at.
        patience: seconds for requests that run when the signal comes; the others are cut off.
        log_level: of uvicorn.
    """
    config = uvicorn.Config(
        app, host=host, port=port, log_level=log_level, timeout_graceful_shutdown=5, server_header=False
    )
    _Server_run(config, app.state.worker, patience).run()
