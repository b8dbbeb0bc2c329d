"""The command line: ``draftwing``, and what becomes of errors.

What takes long to import (torch above all) is imported by the commands, so that ``--help`` does not wait for it.
Errors raised on purpose become one line and exit code 2; a check that fails (a text that differs) exits with 1.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from draftwing.cli import bench, chat, compare, data, generate, heads, models, predict, screen, serve, train, tune
from draftwing.errors import DraftwingError

# The parser's error for a wrong option. Some versions of typer contain a copy of click, so that there is no one place
# to import it from.
_UsageError: Any = typer.BadParameter.__base__


class _Group(TyperGroup):
    """Turns what a command raises into what a shell expects: one line, and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            code = _refuse(error)
        raise typer.Exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            with screen.quiet():
                return super().invoke(ctx)
        except DraftwingError as error:
            screen.error(str(error))
            code = 2
        except _UsageError as error:
            code = _refuse(error)
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:
            screen.silence()
            code = 1
        except OSError as error:  # a full disk under stdout, say: nothing that a traceback would explain
            screen.silence()
            screen.error(str(error) or type(error).__name__)
            code = 2
        raise typer.Exit(code)


def _refuse(error: Any) -> int:
    """Say what is wrong with the arguments; the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the whole help
        raise error
    where = error.ctx.command_path if error.ctx is not None else "draftwing"
    screen.error(f"{error.format_message()} (see {where} --help)")
    return 2


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from draftwing import __version__

        print(f"draftwing {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding: several tokens per forward pass of a model, and the same text."""


_COMMANDS: dict[str, list[Callable[..., None]]] = {
    "Generate text": [generate.generate, chat.chat, serve.serve, chat.demo],
    "Measure": [compare.compare, compare.verify, bench.bench, predict.predict],
    "Train and exchange heads": [train.train, heads.doctor, heads.convert, heads.export],
    "Models and data": [models.info, models.import_],
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(_command.__name__.strip("_"), rich_help_panel=_panel)(_command)
app.add_typer(tune.tune_app, name="tune", rich_help_panel="Measure")
app.add_typer(models.models_app, name="models", rich_help_panel="Models and data")
app.add_typer(data.data_app, name="data", rich_help_panel="Models and data")
app.add_typer(data.datastore_app, name="datastore", rich_help_panel="Models and data")


def main() -> None:
    """The ``draftwing`` command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    code: Any = 0
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = 130
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        screen.silence()
        code = code or 1
    except OSError as error:
        screen.silence()
        screen.error(f"stdout: {error}: check the disk")
        code = code or 2
    sys.exit(code)


if __name__ == "__main__":
    main()
