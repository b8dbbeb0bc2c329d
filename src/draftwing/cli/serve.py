"""``draftwing serve``: an HTTP server that speaks the OpenAI protocol."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from draftwing.cli import screen
from draftwing.cli.options import ChatModel, Draft, Drafting, with_options
from draftwing.errors import ConfigError, UnsupportedError

_KEY = "DRAFTWING_API_KEY"
_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Listening:
    """Where, and for whom."""

    host: Annotated[str, typer.Option("--host", help="Address to listen at; 0.0.0.0 for all of them.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000
    name: Annotated[
        list[str] | None, typer.Option("--name", help="What to call the model; repeatable. [default: the target]")
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help=f"Key that clients must send; repeatable. [default: that of {_KEY}, if any]"),
    ] = None

    @property
    def is_local(self) -> bool:
        """Whether this machine alone can reach it."""
        return self.host in _HERE

    def keys(self) -> tuple[str, ...]:
        """The keys. Raises ConfigError where one is empty."""
        given = self.api_key or ([os.environ[_KEY]] if _KEY in os.environ else [])
        if not all(key.strip() for key in given):
            raise ConfigError(f"--api-key is empty: give a key, or leave --api-key and {_KEY} out")
        return tuple(key.strip() for key in given)


@dataclass(frozen=True)
class Limits:
    """How much is taken at once."""

    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Texts decoded at once.")] = 8
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=0, help="Texts that may wait beyond these; more are refused (429).")
    ] = 64
    kv_memory: Annotated[
        float | None,
        typer.Option(
            "--kv-memory",
            help="GiB for the KV slots of target and draft, taken at once and never exceeded; prompts that begin alike "
            "then share slots. [default: they grow with what is decoded]",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            help="Of an answer that names no limit. [default: the rest of the context]",
        ),
    ] = None
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="MiB of a request at most.")] = 8
    patience: Annotated[
        float, typer.Option("--patience", min=0, help="Seconds for running requests after SIGTERM or Ctrl-C.")
    ] = 30.0


@with_options
def serve(model: ChatModel, drafting: Drafting, listening: Listening, limits: Limits, draft: Draft = None) -> None:
    """Serve a model over the OpenAI API: chat, completions, tools, JSON schemas, Prometheus metrics.

    With a seed, or at temperature 0, an answer is the same whoever else is served and whatever is drafted. A request
    may choose how that is done: `"speculation": {"draft": "none"}`, or `{"tree": "chain:5"}`.

    Examples:

    - `draftwing serve`

    - `draftwing serve --target path/or/hub-id --draft path/to/head --quantize int8 --max-batch 16`

    - `DRAFTWING_API_KEY=secret draftwing serve --host 0.0.0.0 --port 80 --name chat`

    - `curl localhost:8000/v1/chat/completions -H 'content-type: application/json'
      -d '{"messages": [{"role": "user", "content": "What is rain?"}]}'`
    """
    drafting.check()
    keys = listening.keys()
    try:
        from draftwing.serve.app import Settings, make_app, run
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"serving needs {error.name}, which is not installed: run pip install 'draftwing[serve]'"
        ) from error
    settings = Settings(
        names=tuple(listening.name or [str(model.target)]),
        max_batch=limits.max_batch,
        max_waiting=limits.max_waiting,
        kv_memory=None if limits.kv_memory is None else int(limits.kv_memory * 2**30),
        max_body=limits.max_body * 2**20,
        max_tokens=limits.max_tokens,
        api_keys=keys,
        hosts=_HERE if listening.is_local else (),
    )
    app = make_app(model.load(draft, drafting), settings)
    if not (keys or listening.is_local):
        screen.line("whoever reaches this machine can use the model: set --api-key to change that", "yellow")
    screen.line(f"{settings.names[0]} at http://{listening.host}:{listening.port}/v1, Ctrl-C ends")
    run(app, host=listening.host, port=listening.port, patience=limits.patience)
