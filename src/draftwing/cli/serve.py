"""``draftwing serve``: an HTTP server that speaks the OpenAI protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from draftwing.cli import screen
from draftwing.cli.drafts import Draft
from draftwing.cli.options import ChatModel, Drafting, with_options
from draftwing.errors import ConfigError

__all__ = ["register"]


@with_options
def serve(
    model: ChatModel,
    drafting: Drafting,
    draft: Draft = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Serve a model to clients of the OpenAI protocol."""
    try:
        from draftwing.serve.app import Settings, make_app
        from draftwing.serve.run import run
    except ImportError as error:
        raise ConfigError(f"serving needs more packages ({error}): run pip install 'draftwing[serve]'") from error
    drafting.check()
    lm = model.load(draft, drafting)
    app = make_app(lm, Settings(names=(str(model.target),)))
    screen.line(f"serving {model.target} at http://{host}:{port}/v1")
    run(app, host=host, port=port)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(serve)
