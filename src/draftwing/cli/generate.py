"""``draftwing generate``: a prompt and what the target writes after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwing.cli import screen
from draftwing.cli.drafts import Draft
from draftwing.cli.options import Drafting, Json, Model, Prompts, SamplingOptions, sampling_option, with_options
from draftwing.errors import PromptError

if TYPE_CHECKING:
    from draftwing.api import LM
    from draftwing.sampling import Sampling
    from draftwing.text.prompts import Prompt

__all__ = ["namer", "register"]


@dataclass(frozen=True)
class Shown:
    """What is shown beside the text."""

    logprobs: Annotated[
        int | None, sampling_option("Show each token's log-probability and so many others.", "--logprobs")
    ] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too, afterwards: speedup, and the same?")
    ] = False
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Print where a step's time went: draft, verify, accept, commit, host."),
    ] = False
    as_json: Json = False


@with_options
def generate(
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    shown: Shown,
    prompt: Annotated[str | None, typer.Argument(help="Or from --prompts, or from stdin.")] = None,
    prompts: Prompts = None,
    draft: Draft = None,
) -> None:
    """Write on from a prompt; colours show how many drafted tokens were accepted at once.

    Examples:

    - `draftwing generate "def quicksort("`

    - `draftwing generate "def quicksort(" -T 0.8 --seed 7 -n 200 --compare`

    - `cat prompt.txt | draftwing generate -t path/or/hub-id -d lookup > continued.txt`

    - `draftwing generate --prompts prompts.jsonl --json`
    """
    from draftwing.evaluate.report import describe_run, record

    drafting.check()
    checked = sampling.to_sampling(shown.logprobs)
    todo = _prompts_of(prompt, prompts)
    lm = model.load(draft, drafting)
    plain = type(lm)(lm.target, lm.tokenizer) if shown.compare else None
    ready = [sampling.put(each, lm.tokenizer) for each in todo]
    if plain is not None:  # first steps are slow, and both shall be spared them
        for method in (plain, lm):
            method.generate([ready[0]], checked, max_tokens=min(checked.max_tokens, 8))
    if shown.as_json:
        records = [record(lm.generate([each], checked)[0], plain, checked) for each in ready]
        screen.print_json({**describe_run(lm, checked), "generations": records})
        return
    _show(lm, ready, checked, plain, echo=prompt if ready == [prompt] else None, profile=shown.profile)


def _show(
    lm: LM, prompts: Sequence[Prompt], sampling: Sampling, plain: LM | None, echo: str | None, *, profile: bool
) -> None:
    """Stream every text, and close each with its figures; ``echo`` is written in front."""
    from draftwing.evaluate.report import record

    shown = screen.Screen()
    for number, each in enumerate(prompts, 1):
        if len(prompts) > 1:
            shown.header(f"prompt {number} of {len(prompts)}")
        if echo is not None:
            shown.prompt(echo)
        try:
            (done,) = lm.generate(
                [each], sampling, on_step=lambda _, found: shown.write(found.text, found.step.rows[0].num_accepted)
            )
        finally:  # after Ctrl-C too
            shown.end_line()
        if done.logprobs is not None:
            shown.logprobs(done.logprobs, namer(lm))
        shown.closing(record(done, plain, sampling), profile=profile)
    if lm.traits.drafts:
        shown.legend()


def namer(lm: LM) -> Callable[[int], str]:
    """A token's text, by its id."""
    return lambda token: repr(lm.tokenizer.decode([token], skip_special_tokens=False))


def _prompts_of(prompt: str | None, file: Path | None) -> Sequence[Prompt]:
    """From the argument, the file or stdin."""
    from draftwing.text.prompts import check_text, read_prompts

    if prompt is not None and file is not None:
        raise PromptError("there are two prompts: give either the argument or --prompts")
    if file is not None:
        return read_prompts(file)
    if prompt is None:
        if sys.stdin is not None and sys.stdin.isatty():
            raise PromptError("there is no prompt: give one as the argument, with --prompts FILE, or on stdin")
        return read_prompts("-")
    if not prompt:
        raise PromptError("the prompt is empty: give some text to go on from")
    return [check_text(prompt)]


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(generate)
