"""``draftwing models [fetch | remove]``: the models that have a name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwing.cli import screen
from draftwing.cli import screen as tables
from draftwing.cli.options import Draft, Drafting, Json, Model, with_options
from draftwing.cli.progress import progress
from draftwing.errors import CheckpointError, ConfigError
from draftwing.models.catalogue import CATALOGUE, Hub, Shipped, Wheel, entry_named

if TYPE_CHECKING:
    from draftwing.models.catalogue import Entry


models_app = typer.Typer(invoke_without_command=True)
Name = Annotated[str, typer.Argument(help="A name of `draftwing models`.")]


@models_app.callback()
def models(context: typer.Context, as_json: Json = False) -> None:
    """List models that have a name: source, licence, and whether they are downloaded.

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


@models_app.command("fetch")
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
    from draftwing.models.resolve import fetch as run

    entry = entry_named(name)
    path = run(entry, again=check)
    if as_json:
        screen.print_json(_describe(entry))
    else:
        print(path)


@models_app.command("remove")
def remove(name: Name, as_json: Json = False) -> None:
    """Remove a model's file from the cache.

    Examples:

    - `draftwing models remove smollm2-135m-instruct`
    """
    from draftwing.models.fetch import remove as run

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
    from draftwing.models.resolve import kept

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
    source = entry.source
    if isinstance(source, Wheel):
        return source.member_num_bytes
    if isinstance(source, Hub):
        return source.num_bytes
    from draftwing.shipped import SHIPPED

    return sum(file.stat().st_size for file in (SHIPPED / source.folder).glob("*") if file.is_file())


# ``draftwing info``: a target, its tokenizer, a drafter and this machine.


@with_options
def info(
    model: Model,
    draft: Draft = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure how fast memory is read: the limit of plain decoding.")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure what a step costs here anew.")] = False,
    as_json: Json = False,
) -> None:
    """Describe a target, its tokenizer, a drafter and this machine.

    Examples:

    - `draftwing info --bandwidth`

    - `draftwing info -t path/or/hub-id -d path/or/smaller --json`
    """
    from draftwing.lab.forecast import describe_costs
    from draftwing.lab.machine import describe_machine, read_bandwidth
    from draftwing.lab.report import describe_lm

    lm = model.load(draft, Drafting())
    sections = {**describe_lm(lm), "machine": describe_machine()}
    if measure or lm.drafter.drafts:
        sections["costs"] = describe_costs(lm.costs(again=measure))
    if bandwidth:
        if lm.target.device.type != "cpu":
            raise ConfigError("--bandwidth measures the processor's memory: add --device cpu")
        speed = read_bandwidth(lm.target.num_weight_bytes)
        limit = speed * 1e9 / lm.target.num_weight_bytes
        sections["bandwidth"] = {"gb_per_s": round(speed, 2), "plain_decoding_limit_tokens_per_s": round(limit, 1)}
    if as_json:
        screen.print_json(sections)
    else:
        tables.print_info(sections)


# ``draftwing import``: a GGUF file as a Hugging Face folder.


def import_(
    file: Annotated[str, typer.Argument(help="A GGUF file (of a split model, the first), or a name.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must be new or empty.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32 (exactly what the file says), bfloat16 or float16.")
    ] = "float32",
    as_json: Json = False,
) -> None:
    """Write a GGUF file as a Hugging Face folder: config, tokenizer, chat template, safetensors.

    Draftwing reads GGUF files as they are (`--target model.gguf`). This is for what does not.

    Examples:

    - `draftwing import model.Q4_K_M.gguf model-folder`

    - `draftwing import model.Q8_0.gguf model-folder --dtype bfloat16`

    - `draftwing import smollm2-135m-instruct model-folder`
    """
    from draftwing.formats.gguf_folder import LINK
    from draftwing.formats.gguf_weights import import_gguf
    from draftwing.models.catalogue import entry_of
    from draftwing.models.resolve import resolve

    path = Path(file)
    if entry_of(file) is not None:
        folder = resolve(file)
        path = folder / LINK
        if not path.exists():
            raise CheckpointError(f"{file} is a folder already, no GGUF file: take {folder}")
    with progress("importing, bytes") as show:
        found = import_gguf(path, out, dtype, show)
    if as_json:
        screen.print_json({**dataclasses.asdict(found), "folder": str(found.folder)})
    else:
        formats = ", ".join(f"{count} in {kind}" for kind, count in sorted(found.formats.items()))
        screen.line(
            f"wrote {found.folder}: {found.tensors} tensors in {dtype}, {found.num_bytes / 1e6:,.0f} MB ({formats})"
        )
