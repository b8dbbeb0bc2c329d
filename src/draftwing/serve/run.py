"""Runs an app until it is told to stop: what is under way is finished, what is new is refused."""

from __future__ import annotations

import signal
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from draftwing.engine.worker import Worker

__all__ = ["run"]


class _Server(uvicorn.Server):
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
    _Server(config, app.state.worker, patience).run()
