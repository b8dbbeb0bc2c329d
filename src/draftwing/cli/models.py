"""``draftwing models [fetch | remove]``: the models that have a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwing.cli import screen, tables
from draftwing.cli.options import Json
from draftwing.errors import ConfigError
from draftwing.model.catalogue import CATALOGUE, Hub, Shipped, Wheel, entry_named

if TYPE_CHECKING:
    from draftwing.model.catalogue import Entry

__all__ = ["register"]

_app = typer.Typer(invoke_without_command=True)
Name = Annotated[str, typer.Argument(help="A name of `draftwing models`.")]


@_app.callback()
def models(context: typer.Context, as_json: Json = False) -> None:
    """Models that have a name: where each comes from, its licence, and whether it is here.

    A name can be given wherever a target or a draft model can. The first use downloads the model, later ones need no
    network.

    Examples:

    - `draftwing models`

    - `draftwing generate --target smollm2-135m-instruct "What is the capital of France?"`
    """
    if context.invoked_subcommand is not None:
        return
    rows = [_describe(entry) for entry in CATALOGUE.values()]
    if as_json:
        screen.print_json({"models": rows})
    else:
        tables.print_models(rows)


@_app.command("fetch")
def fetch(
    name: Name,
    check: Annotated[
        bool, typer.Option("--check", help="Hash the file that is there; download it anew if it is damaged.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Download a model, unless it is here already; prints where it lies.

    A wheel of the Python package index is downloaded by pip, with its settings for mirrors, proxies and credentials.
    The file is checked, and kept in `~/.cache/draftwing/models` (or in the folder that DRAFTWING_CACHE names).

    Examples:

    - `draftwing models fetch smollm2-135m-instruct`

    - `draftwing models fetch smollm2-135m-instruct --check`
    """
    from draftwing.model.resolve import fetch as run

    entry = entry_named(name)
    path = run(entry, again=check)
    if as_json:
        screen.print_json(_describe(entry))
    else:
        print(path)


@_app.command("remove")
def remove(name: Name, as_json: Json = False) -> None:
    """Remove a model's file from the cache.

    Examples:

    - `draftwing models remove smollm2-135m-instruct`
    """
    from draftwing.model.wheel import remove as run

    entry = entry_named(name)
    if isinstance(entry.source, Shipped):
        raise ConfigError(f"{name} comes with Draftwing and cannot be removed by itself: leave it")
    if isinstance(entry.source, Hub):
        raise ConfigError(f"{name} lies in the Hugging Face cache: remove it with `hf cache delete`")
    freed = run(name)
    if as_json:
        screen.print_json({"name": name, "freed_bytes": freed})
    else:
        screen.line(f"removed {name}: {freed / 1e6:,.1f} MB freed" if freed else f"{name} is not here: nothing to do")


def _describe(entry: Entry) -> dict[str, Any]:
    """An entry, and where it lies here, for ``--json`` and the table."""
    from draftwing.model.resolve import kept

    place = kept(entry)
    return {
        "name": entry.name,
        "num_parameters": entry.num_parameters,
        "licence": entry.licence,
        "source": _source(entry),
        "num_bytes": _num_bytes(entry),
        "path": None if place is None else str(place),
        "heads": list(entry.heads),
    }


def _source(entry: Entry) -> str:
    source = entry.source
    if isinstance(source, Wheel):
        return f"wheel {source.package} {source.version}"
    return f"hub {source.repo}" if isinstance(source, Hub) else "comes with Draftwing"


def _num_bytes(entry: Entry) -> int:
    """Of what is on the disk."""
    source = entry.source
    if isinstance(source, Wheel):
        return source.member_num_bytes
    if isinstance(source, Hub):
        return source.num_bytes
    from draftwing.shipped import SHIPPED

    return sum(file.stat().st_size for file in (SHIPPED / source.folder).glob("*") if file.is_file())


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(_app, name="models")
