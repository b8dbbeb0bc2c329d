"""Prompts whose answers repeat much of what was given: edits of a file, and summaries.

    python benchmarks/copy_heavy.py --out copy-heavy.jsonl --summaries spec_bench.jsonl        # a chat model's
    python benchmarks/copy_heavy.py --out copy-code.jsonl --plain                              # a base model's

The files are those that the shipped target has never seen (``recipes/held_out.txt``). An edit renames a function; a
base model gets the file, a comment that announces the renamed function, and its beginning. Summaries are the rows of
``--summaries`` whose category is summarization.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from draftwing.text.prompts import read_entries

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from corpus import documents

SHORTEST, LONGEST = 400, 1400  # characters of a piece


def pieces(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Return (name, code) of one function of each held-out file, in random order."""
    found = []
    for _, text in documents(held_out=True):
        functions = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
        whole = [(each.name, str(ast.get_source_segment(text, each))) for each in functions]
        fitting = [each for each in whole if SHORTEST <= len(each[1]) <= LONGEST]
        if fitting:
            found.append(rng.choice(fitting))
    rng.shuffle(found)
    yield from found


def edit(name: str, text: str, *, plain: bool) -> str:
    """Return the request for an edit, or the beginning of the edited text."""
    other = f"{name}_checked"
    if plain:
        return f"{text}\n\n# The same function, renamed to {other}.\ndef {other}("
    return (
        f"Rename the function {name} to {other} in this code, and write the whole code again:\n\n```python\n{text}```"
    )


def main(
    out: Annotated[Path, typer.Option(help="JSONL of prompts.")],
    plain: Annotated[bool, typer.Option("--plain", help="For a base model.")] = False,
    summaries: Annotated[Path | None, typer.Option(help="Spec-Bench's questions, or others with a category.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Of each sort.")] = 12,
    seed: int = 0,
) -> None:
    """Write the prompts, and print how many."""
    rows = [
        {"category": "edit", **({"prompt": wish} if plain else {"turns": [wish]})}
        for wish in (edit(*each, plain=plain) for each in pieces(random.Random(seed)))
    ][:count]
    if summaries is not None:
        asked = [each for _, each in read_entries(summaries)]
        rows += [each for each in asked if each.get("category") == "summarization"][:count]
    out.write_text("".join(json.dumps(each) + "\n" for each in rows))
    typer.echo(f"wrote {len(rows)} prompts: {out}")


if __name__ == "__main__":
    typer.run(main)
