"""``draftwing convert | export | doctor``: heads on disk, written in other layouts and examined."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwing.cli import screen, tables
from draftwing.cli.drafts import or_of
from draftwing.cli.options import FewExamples, Json, Model, taps_of, with_options
from draftwing.drafters.kinds import KINDS
from draftwing.errors import ConfigError
from draftwing.model.catalogue import entry_of

__all__ = ["register"]

_LAYOUTS = dict.fromkeys(name for kind in KINDS.values() if kind.net is not None for name in kind.net.layouts)
Head = Annotated[Path, typer.Argument(help="Folder of a head, in any layout.")]


def convert(
    head: Head,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    to: Annotated[str, typer.Option("--to", help=f"{or_of(_LAYOUTS)}.")] = "draftwing",
    target: Annotated[str | None, typer.Option("--target", "-t", help="The head's target, if it does not say.")] = None,
    taps: Annotated[
        str | None, typer.Option("--taps", help="The hidden states that it reads, such as 2,16,29, if it does not say.")
    ] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Draft tokens that speculators' config proposes.")] = 5,
) -> None:
    """Write a head in another layout. No number changes; what a layout cannot say is an error.

    Examples:

    - `draftwing convert my-head/head --to speculators -o my-head-speculators`

    - `draftwing convert downloaded-eagle3 -o head --target path/or/hub-id`
    """
    from draftwing.drafters.kinds import convert as run

    run(head, out, to, target=_target_id(target), taps=taps_of(taps), depth=depth)
    screen.line(f"wrote {out} in the layout {to!r}")


def export(
    head: Head,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    to: Annotated[str, typer.Option("--to", help="vllm or sglang.")] = "vllm",
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Folder, name or hub id that the engine shall serve.")
    ] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Draft tokens in a row.")] = 3,
) -> None:
    """Write a head as an engine takes it, and print the command that serves it.

    Examples:

    - `draftwing export my-head/head --to vllm --target path/or/hub-id -o my-head-vllm`
    """
    from draftwing.drafters.kinds import convert as run
    from draftwing.heads.convert import SERVED_BY, serve_command
    from draftwing.model.resolve import fetch

    if to not in SERVED_BY:
        raise ConfigError(f"no engine serves the layout {to!r}: choose vllm or sglang (or use convert)")
    run(head, out, to, target=_target_id(target), depth=depth)
    entry = entry_of(target)  # engines do not know our names
    served = str(target if entry is None else fetch(entry))
    if served.endswith(".gguf"):
        screen.line(
            f"the target is a GGUF file, which engines read in part or not at all: `draftwing import {served} FOLDER` "
            f"writes a folder with the same numbers; serve that",
            "yellow",
        )
    print(serve_command(to, served, out, depth))


@with_options
def doctor(
    model: Model,
    head: Head,
    examples: FewExamples,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Decode a few prompts with it.")] = True,
    as_json: Json = False,
) -> None:
    """Look at a head for a target: every trap that fails silently elsewhere, and whether the target accepts its drafts.

    A head is tried on prompts of its own kind: those that its training held out and stored with it, else questions
    through the target's chat template, else (for targets that do not chat) beginnings of Python files. Exits with 1
    where a check fails, or where it drafts no better than chance.

    Examples:

    - `draftwing doctor my-head/head`

    - `draftwing doctor downloaded-eagle3 --target path/or/hub-id --prompts prompts.jsonl`
    """
    from draftwing.api import load
    from draftwing.drafters.kinds import diagnose
    from draftwing.evaluate.fit import measure_fit, trial_of
    from draftwing.model.resolve import resolve

    findings = diagnose(head, resolve(model.target))
    failed = any(each.status == "fail" for each in findings)
    fit = None
    if measure and not failed:
        lm = load(**vars(model), draft=head)
        own = examples.read() if examples.prompts else None
        fit = measure_fit(lm, trial_of(head, lm.tokenizer, examples.num_prompts, own, where=str(examples.prompts)))
        failed = fit.verdict == "does not fit"
    if as_json:
        found = [dataclasses.asdict(each) for each in findings]
        screen.print_json({"findings": found, "fit": None if fit is None else dataclasses.asdict(fit)})
    else:
        tables.print_findings(findings, fit)
    if failed:
        raise typer.Exit(1)


def _target_id(target: str | None) -> Any:
    from draftwing.heads.identity import target_id_of_folder
    from draftwing.model.resolve import resolve

    return None if target is None else target_id_of_folder(resolve(target), target)


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (convert, export, doctor):
        app.command()(command)
