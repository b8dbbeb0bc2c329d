"""``draftwing datastore build | info``: texts that drafts are retrieved from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwing.cli import screen, tables
from draftwing.cli.options import Json, Target
from draftwing.cli.progress import progress

if TYPE_CHECKING:
    from draftwing.drafters.retrieval.store import Store

__all__ = ["register"]

_app = typer.Typer(no_args_is_help=True, help="Texts that drafts are retrieved from (REST): `build`, `info`.")


@_app.command("build")
def build(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Text files, JSONL files of texts or dialogues (as for `train --data`), or folders of them."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must be new.")],
    target: Target = None,
    exclude: Annotated[
        Path | None, typer.Option("--exclude", help="File of names (globs, or prefix/) to leave out of folders.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a datastore of texts like those that the target will write; `--draft FOLDER` then drafts from it.

    It holds the texts as ids of the target's tokenizer (no weights are read), and 8 bytes on disk for each token.
    `pip install 'draftwing[datastore]'` sorts large ones several times as fast.

    Examples:

    - `draftwing datastore build src docs --target path/or/hub-id --out project-store`

    - `draftwing datastore build answered.jsonl -t smollm2-135m-instruct -o answers-store --json`

    - `draftwing generate "def main(" --target path/or/hub-id --draft project-store`
    """
    from draftwing.drafters.retrieval.datastore import check_new
    from draftwing.model.resolve import resolve
    from draftwing.text.tokenizer import Tokenizer
    from draftwing.train.data.datastore import build_datastore, read_texts

    check_new(out)
    tokenizer = Tokenizer(resolve(target))
    with progress("reading the texts, bytes") as on_progress:
        texts = read_texts(files, tokenizer, exclude=exclude, on_progress=on_progress)
    with progress(f"sorting {len(texts.tokens):,} tokens"):
        store = build_datastore(out, texts, tokenizer, str(target or "draftwing/target"))
    if as_json:
        screen.print_json(_described(out, store))
        return
    about = store.about
    screen.line(
        f"wrote {out}: {about['num_tokens']:,} tokens in {about['num_texts']:,} texts, {store.num_bytes / 1e6:,.1f} MB"
    )
    screen.line(f"draft from it: draftwing generate ... --draft {out}", "dim")


@_app.command("info")
def info(
    folder: Annotated[Path, typer.Argument(help="A datastore.")],
    check: Annotated[bool, typer.Option("--check", help="Read all of it, and see that nothing is damaged.")] = False,
    as_json: Json = False,
) -> None:
    """Describe a datastore: its texts, whose tokenizer it is for, and its size.

    Examples:

    - `draftwing datastore info project-store`

    - `draftwing datastore info project-store --check --json`
    """
    from draftwing.drafters.retrieval.datastore import read_datastore

    store = read_datastore(folder, whole=check)
    found = _described(folder, store)
    if as_json:
        screen.print_json({**found, "checked": check})
    else:
        tables.print_info({"datastore": {**found, "checked": "all of it" if check else "in part (all with --check)"}})


def _described(folder: Path, store: Store) -> dict[str, Any]:
    about = store.about
    names = ("num_tokens", "num_texts", "num_files", "target", "vocab_size", "vocab_hash", "identity")
    return {"folder": str(folder), **{name: about.get(name) for name in names}, "num_bytes": store.num_bytes}


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(_app, name="datastore")
