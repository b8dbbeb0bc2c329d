"""``draftwing import``: a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from draftwing.cli import screen
from draftwing.cli.options import Json
from draftwing.cli.progress import progress
from draftwing.errors import CheckpointError

__all__ = ["register"]


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
    from draftwing.gguf.folder import LINK
    from draftwing.gguf.unpack import import_gguf
    from draftwing.model.catalogue import entry_of
    from draftwing.model.resolve import resolve

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


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command(name="import")(import_)
