"""The ``draftwing`` command: its subcommands, exit codes and error messages.

Commands import what takes long to import (torch above all) when they run, so that ``--help`` does not wait for it.
Errors raised on purpose become one line and exit code 2; a check that fails (a text that differs) exits with 1.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from draftwing.cli import bench, chat, data, generate, measure, models, screen, serve, train
from draftwing.cli.options import option, with_options
from draftwing.errors import DraftwingError, reason
from draftwing.storage import write_fix

# The parser's error for a wrong option. Some versions of typer contain a copy of click, so there is no fixed place to
# import it from.
_UsageError: Any = typer.BadParameter.__base__


class _Group(TyperGroup):
    """Turns exceptions of a command into one line and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            code = _print_usage_error(error)
        raise typer.Exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            with screen.short_warnings():
                return super().invoke(ctx)
        except DraftwingError as error:
            screen.error(str(error))
            code = 2
        except _UsageError as error:
            code = _print_usage_error(error)
        except KeyboardInterrupt:
            code = 130
        except OSError as error:
            code = _give_up_stdout(error)
        raise typer.Exit(code)


def _print_usage_error(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # the whole help
        raise error
    _improve_suggestions(error)
    command = error.ctx.command_path if error.ctx is not None else "draftwing"
    screen.error(f"{error.format_message()} (see {command} --help)")
    return 2


def _improve_suggestions(error: Any) -> None:
    """Suggest the options that a shortened one begins, and never --help, whose hint follows anyway."""
    if (typed := getattr(error, "option_name", None)) and hasattr(error, "possibilities") and error.ctx is not None:
        options = [name for param in error.ctx.command.params for name in param.opts]
        begun = [name for name in options if name.startswith(typed)]
        error.possibilities = begun or [name for name in error.possibilities or () if name != "--help"]


def _give_up_stdout(error: OSError) -> int:
    """Report a full disk under stdout, or nothing if its reader is gone; return the exit code."""
    screen.discard_stdout()
    if isinstance(error, BrokenPipeError):
        return 1
    screen.error(f"{reason(error)}: {write_fix(error)}")
    return 2


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from draftwing import __version__

        print(f"draftwing {__version__}")
        raise typer.Exit


@app.callback()
@with_options
def _root(version: bool = option(False, "Print the version.", callback=_print_version, is_eager=True)) -> None:
    """Speculative decoding: several tokens per forward pass of a model, and the same text."""


for panel, commands in {
    "Generate text": [generate.generate, chat.chat, serve.serve, chat.demo],
    "Measure": [measure.compare, measure.verify, bench.bench, measure.predict],
    "Train and exchange heads": [train.train, train.doctor, train.convert, train.export],
    "Models and data": [models.list_, models.pull, models.rm, models.info, models.import_],
}.items():
    for command in commands:
        app.command(command.__name__.strip("_"), rich_help_panel=panel)(command)
app.command("run", rich_help_panel="Generate text")(chat.chat)
app.add_typer(measure.tune_app, name="tune", rich_help_panel="Measure")
app.add_typer(data.data_app, name="data", rich_help_panel="Models and data")
app.add_typer(data.datastore_app, name="datastore", rich_help_panel="Models and data")


def main() -> None:
    """Run the command line."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    code: Any = 0
    try:
        app()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = 130
    except OSError as error:  # while it printed the help or the version
        code = _give_up_stdout(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        failure = _give_up_stdout(error)
        code = code or failure
    sys.exit(code)


if __name__ == "__main__":
    main()
