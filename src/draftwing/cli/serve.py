"""``draftwing serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from dataclasses import dataclass

from draftwing.cli import screen
from draftwing.cli.options import DRAFT, Drafting, Model, option, with_options
from draftwing.errors import ConfigError, UnsupportedError

_KEY = "DRAFTWING_API_KEY"
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Server:
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all of them.")
    port: int = option(8000, "Port to listen on.", min=1, max=65535)
    name: list[str] | None = option(None, "Name of the model in the API; repeatable. [default: the target]")
    api_key: list[str] | None = option(None, f"Key that clients must send; repeatable. [default: {_KEY}, if set]")
    max_batch: int = option(8, "Number of requests decoded at once.", min=1)
    max_waiting: int = option(64, "Number of further requests that may wait; more are refused (429).", min=0)
    kv_memory: float | None = option(
        None, "GiB for the KV cache, allocated at the start; prompts with a common prefix share it. [default: it grows]"
    )
    max_tokens: int | None = option(None, "Default limit of a request. [default: the context]", "-n", min=1)
    max_nodes: int = option(64, "Nodes of the largest draft tree that a request may choose.", min=1, expert=True)
    max_body: int = option(8, "Maximum size of a request in MiB.", min=1, expert=True)
    allowed_host: list[str] | None = option(
        None,
        "Host name under which a proxy or other machines reach the server; repeatable. [default: any with --host]",
        expert=True,
    )
    patience: float = option(30.0, "Seconds for running requests after SIGTERM or Ctrl-C.", min=0, expert=True)

    def keys(self) -> tuple[str, ...]:
        """Return the keys. Raises ConfigError if one is empty."""
        given = self.api_key or ([os.environ[_KEY]] if _KEY in os.environ else [])
        if not all(key.strip() for key in given):
            raise ConfigError(f"--api-key is empty: give a key, or leave --api-key and {_KEY} out")
        return tuple(key.strip() for key in given)

    def kv_bytes(self) -> int | None:
        """Return the memory for the KV cache. Raises ConfigError if it is no amount."""
        if self.kv_memory is None:
            return None
        if not 0 < self.kv_memory < 2**33:  # 2**63 bytes
            raise ConfigError(f"--kv-memory takes GiB of this machine's memory, found {self.kv_memory:g}: try 2")
        return int(self.kv_memory * 2**30)


@with_options
def serve(model: Model, drafting: Drafting, server: Server, draft: str | None = DRAFT) -> None:
    """Serve a model over the OpenAI API: chat, completions, tools, JSON schemas, Prometheus metrics.

    With a seed, or at temperature 0, an answer depends neither on other requests nor on drafts. A request may choose
    drafts: `"speculation": {"draft": "none"}`, or `{"tree": "chain:5"}`.

    Examples:

    - `draftwing serve`
    - `draftwing serve --target path/or/hub-id --draft path/to/head --quantize int8 --max-batch 16`
    - `DRAFTWING_API_KEY=secret draftwing serve --host 0.0.0.0 --port 80 --name chat`
    - `curl localhost:8000/v1/chat/completions -H 'content-type: application/json'
      -d '{"messages": [{"role": "user", "content": "What is rain?"}]}'`
    """
    keys, kv_memory = server.keys(), server.kv_bytes()
    try:
        from draftwing.serve.app import Settings, bind, make_app, run
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"serving needs {error.name}, which is not installed: run pip install 'draftwing[serve]'"
        ) from error
    sockets = bind(server.host, server.port)  # before the model is loaded, which takes longer
    is_local = server.host in _LOCAL_HOSTS
    settings = Settings(
        names=tuple(server.name or [model.name]),
        max_batch=server.max_batch,
        max_waiting=server.max_waiting,
        kv_memory=kv_memory,
        max_body=server.max_body * 2**20,
        max_nodes=server.max_nodes,
        max_tokens=server.max_tokens,
        api_keys=keys,
        hosts=(*_LOCAL_HOSTS, *(server.allowed_host or ())) if is_local or server.allowed_host else (),
    )
    if kv_memory is not None:
        model.check_kv_memory(kv_memory, drafting)
    lm = model.load(draft, drafting)
    app = make_app(lm, settings)
    if not (keys or is_local):
        screen.line("anyone who can reach this machine can use the model: set --api-key to prevent that", "yellow")
    screen.line(f"{settings.names[0]} at http://{server.host}:{server.port}/v1, Ctrl-C ends")
    run(app, sockets, patience=server.patience)
