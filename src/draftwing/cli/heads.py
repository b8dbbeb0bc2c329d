"""``draftwing convert | export | doctor``: heads on disk, written in other layouts and examined."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwing.cli import screen
from draftwing.cli import screen as tables
from draftwing.cli.options import FewExamples, Json, Model, or_of, taps_of, with_options
from draftwing.errors import ConfigError
from draftwing.models.catalogue import entry_of

# Of all methods; written here, since these are classes that import PyTorch.
_LAYOUTS = ("draftwing", "eagle", "vllm", "sglang", "speculators", "medusa")
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
    """Convert a head to another layout without changing a number.

    Examples:

    - `draftwing convert my-head/head --to speculators -o my-head-speculators`

    - `draftwing convert downloaded-eagle3 -o head --target path/or/hub-id`
    """
    from draftwing.methods.registry import convert as run

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
    """Write a head in another engine's layout, and print the command that serves it.

    Examples:

    - `draftwing export my-head/head --to vllm --target path/or/hub-id -o my-head-vllm`
    """
    from draftwing.formats.convert import SERVED_BY, serve_command
    from draftwing.methods.registry import convert as run
    from draftwing.models.resolve import fetch

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
    """Check a head for a target: known causes of silent failure, and whether its drafts are accepted.

    A head is tried on prompts of its own kind: those that its training held out and stored with it, else questions
    through the target's chat template, else (for targets that do not chat) beginnings of Python files. Exits with 1
    where a check fails, or where it drafts no better than chance.

    Examples:

    - `draftwing doctor my-head/head`

    - `draftwing doctor downloaded-eagle3 --target path/or/hub-id --prompts prompts.jsonl`
    """
    from draftwing.lab.fit import measure_fit, trial_of
    from draftwing.loading import load
    from draftwing.methods.registry import diagnose
    from draftwing.models.resolve import resolve

    findings = diagnose(head, resolve(model.target))
    failed = any(each.status == "fail" for each in findings)
    fit = None
    if measure and not failed:
        lm = load(**vars(model), draft=head)
        own = examples.read(model.target) if examples.prompts else None
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
    from draftwing.formats.identity import target_id_of_folder
    from draftwing.models.resolve import resolve

    return None if target is None else target_id_of_folder(resolve(target), target)
