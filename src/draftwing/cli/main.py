"""The command line: ``draftwing generate | compare | verify | predict | info``; what is around heads: ``cli_heads``.

What takes long to import (torch above all) is imported by the commands, so that ``--help`` does not wait for it.
Errors raised on purpose become one line and exit code 2; a check that fails (a text that differs) exits with 1.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from draftwing.cli import heads as cli_heads
from draftwing.cli import screen
from draftwing.cli.options import (
    Draft,
    Drafting,
    Json,
    Model,
    NumPrompts,
    Prompts,
    SamplingOptions,
    sampling_option,
    with_options,
)
from draftwing.errors import ConfigError, DraftwingError, PromptError

if TYPE_CHECKING:
    from draftwing.api import LM
    from draftwing.sampling import Sampling
    from draftwing.text.prompts import Prompt

__all__ = ["app", "main"]


class _Group(TyperGroup):
    """Turns what a command raises into what a shell expects."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with screen.quiet():
                return super().invoke(ctx)
        except DraftwingError as error:
            screen.error(str(error))
            code = 2
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:
            screen.silence()
            code = 1
        raise typer.Exit(code)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _many_prompts(file: Path | None, limit: int) -> Sequence[Prompt]:
    from draftwing.text.prompts import read_prompts, shipped_prompts

    return read_prompts(file, limit) if file else shipped_prompts(limit)


def _namer(lm: LM) -> Callable[[int], str]:
    return lambda token: repr(lm.tokenizer.decode([token], skip_special_tokens=False))


# Why texts may differ under the classic rules.
_LAW_ONLY = "at a temperature above 0 it keeps the law of the text, not the text itself"


# --- commands --------------------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        from draftwing import __version__

        print(f"draftwing {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding: several tokens per forward pass of a model, and the same text."""


@app.command()
@with_options
def generate(
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    prompt: Annotated[str | None, typer.Argument(help="Or from --prompts, or from stdin.")] = None,
    prompts: Prompts = None,
    draft: Draft = None,
    logprobs: Annotated[
        int | None, sampling_option("Show each token's log-probability and so many others.", "--logprobs")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too, afterwards: speedup, and the same?")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Print where a step's time went: draft, verify, accept, commit, host."),
    ] = False,
    as_json: Json = False,
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
    checked = sampling.to_sampling(logprobs)
    todo = _prompts_of(prompt, prompts)
    lm = model.load(draft, drafting)
    plain = type(lm)(lm.target, lm.tokenizer) if compare else None
    ready = [sampling.put(each, lm.tokenizer) for each in todo]
    if plain is not None:  # first steps are slow, and both shall be spared them
        for method in (plain, lm):
            method.generate([ready[0]], checked, max_tokens=min(checked.max_tokens, 8))
    if as_json:
        records = [record(lm.generate([each], checked)[0], plain, checked) for each in ready]
        screen.print_json({**describe_run(lm, checked), "generations": records})
        return
    _show(lm, ready, checked, plain, echo=prompt if ready == [prompt] else None, profile=profile)


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
            shown.logprobs(done.logprobs, _namer(lm))
        shown.closing(record(done, plain, sampling), profile=profile)
    if lm.drafter_name != "none":
        shown.legend()


def _prompts_of(prompt: str | None, file: Path | None) -> Sequence[Prompt]:
    """From the argument, the file or stdin."""
    from draftwing.text.prompts import read_prompts

    if prompt is not None and file is not None:
        raise PromptError("there are two prompts: give either the argument or --prompts")
    if file is not None:
        return read_prompts(file)
    if prompt is None:
        if sys.stdin.isatty():
            raise PromptError("there is no prompt: give one as the argument, with --prompts FILE, or on stdin")
        return read_prompts("-")
    if not prompt:
        raise PromptError("the prompt is empty: give some text to go on from")
    return [prompt]


@app.command()
@with_options
def compare(
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            "-d",
            help="Folder or hub id of a draft model, or lookup; repeatable. [default: lookup, and the shipped draft "
            "model for the shipped target]",
        ),
    ] = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = 10,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Decode every prompt so often.")] = 1,
    texts: Annotated[bool, typer.Option("--texts", help="Show what each wrote after the first prompt.")] = False,
    as_json: Json = False,
) -> None:
    """Measure drafters against plain decoding on the same prompts.

    Exits with 1 where a text is not plain decoding's under a rule that promises it.

    Examples:

    - `draftwing compare`

    - `draftwing compare -t path/or/hub-id -d path/or/smaller -d lookup --prompts prompts.jsonl -T 0.8`
    """
    from draftwing.evaluate.compare import compare as measure

    checked = sampling.to_sampling()
    drafting.check()
    todo = _many_prompts(prompts, num_prompts)
    lms = model.load_many(draft, drafting)
    ready = [sampling.put(each, lms[0].tokenizer) for each in todo]
    with screen.progress("comparing") as on_progress:
        found = measure(lms, ready, checked, rounds=rounds, on_progress=on_progress)
    if as_json:
        screen.print_json(found.to_dict())
    else:
        note = f"rule {drafting.rule}: {_LAW_ONLY}" if drafting.keeps_law_alone(checked) else ""
        screen.print_comparison(found, note, texts=texts)
    if not (found.all_identical or drafting.keeps_law_alone(checked)):
        raise typer.Exit(1)


@app.command()
@with_options
def verify(
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    draft: Draft = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = 10,
    allow_ties: Annotated[
        bool, typer.Option("--allow-ties", help="Forgive differences within the rounding noise of the logits.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check that the drafted text is plain decoding's, token by token; exits with 1 where it is not.

    Of every difference it says by what margin plain decoding chose, and how far rounding alone moves a score there.

    Examples:

    - `draftwing verify`

    - `draftwing verify -t path/or/hub-id -d path/or/smaller --prompts prompts.jsonl -T 0.8 --allow-ties`
    """
    from draftwing.evaluate.lossless import verify as check

    checked = sampling.to_sampling()
    drafting.check()
    if drafting.keeps_law_alone(checked):
        raise ConfigError(f"rule {drafting.rule!r}: {_LAW_ONLY}: verify it with --temperature 0, or use --rule match")
    todo = _many_prompts(prompts, num_prompts)
    lm = model.load(draft, drafting)
    ready = [sampling.put(each, lm.tokenizer) for each in todo]
    with screen.progress("verifying") as on_progress:
        found = check(lm, ready, checked, on_progress=on_progress)
    if as_json:
        screen.print_json(found.to_dict())
    else:
        screen.print_verification(found, _namer(lm))
    if any(not (allow_ties and each.is_tie) for each in found.differences):
        raise typer.Exit(1)


@app.command()
@with_options
def predict(
    model: Model,
    sampling: SamplingOptions,
    draft: Draft = None,
    prompts: Prompts = None,
    num_prompts: NumPrompts = 4,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine's costs anew.")] = False,
    as_json: Json = False,
) -> None:
    """What speculation is worth here by the papers' formulas, beside what is measured.

    Acceptance (alpha) and the costs of drafting and verifying are measured; the formulas make speedups of them.

    Examples:

    - `draftwing predict`

    - `draftwing predict -t path/or/hub-id -d path/or/head --prompts prompts.jsonl -T 1 --json`
    """
    from draftwing.evaluate.predict import predict as find

    checked = sampling.to_sampling()
    todo = _many_prompts(prompts, num_prompts)
    lm = model.load(draft, Drafting())
    ready = [sampling.put(each, lm.tokenizer) for each in todo]
    with screen.progress("measuring") as on_progress:
        lm.costs(again=measure)
        found = find(lm, ready, checked, on_progress=on_progress)
    if as_json:
        screen.print_json(found.to_dict())
    else:
        screen.print_predictions(found)


@app.command()
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
    from draftwing.evaluate.machine import describe_machine, read_bandwidth
    from draftwing.evaluate.predict import describe_costs
    from draftwing.evaluate.report import describe_lm

    lm = model.load(draft, Drafting())
    sections = {**describe_lm(lm), "machine": describe_machine()}
    if measure or lm.drafter_name != "none":
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
        screen.print_info(sections)


cli_heads.register(app)


def main() -> None:
    """The ``draftwing`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    app()


if __name__ == "__main__":
    main()
