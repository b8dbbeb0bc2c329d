"""``draftwing compare | verify``: what speculation gains, and whether the text is the target's."""

from __future__ import annotations

from typing import Annotated

import typer

from draftwing.cli import screen
from draftwing.cli import screen as tables
from draftwing.cli.generate import namer
from draftwing.cli.options import Compared, Draft, Drafting, Examples, Json, Model, SamplingOptions, with_options
from draftwing.cli.progress import progress
from draftwing.errors import ConfigError


@with_options
def compare(
    compared: Compared,
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    examples: Examples,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Decode every prompt so often.")] = 1,
    texts: Annotated[bool, typer.Option("--texts", help="Show what each wrote after the first prompt.")] = False,
    as_json: Json = False,
) -> None:
    """Measure drafters against plain decoding on the same prompts.

    Exits with 1 where a text is not plain decoding's under a rule that promises it.

    Examples:

    - `draftwing compare`

    - `draftwing compare --all`

    - `draftwing compare -t path/or/hub-id -d path/or/smaller -d lookup --prompts prompts.jsonl -T 0.8`
    """
    from draftwing.lab.compare import compare as measure

    checked = sampling.to_sampling()
    drafting.check()
    todo = examples.read(model.target)
    lms = model.load_many(compared.draft, drafting, every=compared.every)
    ready = [sampling.put(each, lms[0].tokenizer) for each in todo]
    with progress("comparing") as on_progress:
        found = measure(lms, ready, checked, rounds=rounds, on_progress=on_progress)
    if as_json:
        screen.print_json(found.to_dict())
    else:
        tables.print_comparison(found, texts=texts)
    if not found.all_identical:
        raise typer.Exit(1)


@with_options
def verify(
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    examples: Examples,
    draft: Draft = None,
    allow_ties: Annotated[
        bool, typer.Option("--allow-ties", help="Forgive differences within the rounding noise of the logits.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that drafted text equals plain decoding's, token by token; exit with 1 if it does not.

    Of every difference it says by what margin plain decoding chose, and how far rounding alone moves a score there.

    Examples:

    - `draftwing verify`

    - `draftwing verify -t path/or/hub-id -d path/or/smaller --prompts prompts.jsonl -T 0.8 --allow-ties`
    """
    from draftwing.lab.compare import verify as check

    checked = sampling.to_sampling()
    drafting.check()
    if drafting.keeps_law_alone(checked):
        raise ConfigError(
            f"rule {drafting.rule!r}: {tables.LAW_ALONE}: verify it with --temperature 0, or use --rule match"
        )
    todo = examples.read(model.target)
    lm = model.load(draft, drafting)
    ready = [sampling.put(each, lm.tokenizer) for each in todo]
    with progress("verifying") as on_progress:
        found = check(lm, ready, checked, on_progress=on_progress)
    if as_json:
        screen.print_json(found.to_dict())
    else:
        tables.print_verification(found, namer(lm))
    if any(not (allow_ties and each.is_tie) for each in found.differences):
        raise typer.Exit(1)
