"""``draftwing generate``: a prompt and what the target writes after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwing.cli import screen
from draftwing.cli.options import Draft, Drafting, Json, Model, Prompts, SamplingOptions, sampling_option, with_options
from draftwing.errors import ConfigError, PromptError, shown

if TYPE_CHECKING:
    from draftwing.lm import LM
    from draftwing.sampling import Sampling
    from draftwing.text.grammar import Grammar
    from draftwing.text.prompts import Prompt


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


@dataclass(frozen=True)
class Form:
    """What the text must follow."""

    json_schema: Annotated[
        str | None,
        sampling_option("The text is JSON that follows this schema: a file, or the schema itself.", "--json-schema"),
    ] = None
    grammar: Annotated[
        str | None,
        sampling_option("The text follows this grammar, in Lark's notation: a file, or the grammar itself."),
    ] = None

    def read(self) -> Grammar | None:
        """The grammar; None for any text."""
        from draftwing.text.grammar import Grammar

        if self.json_schema is not None and self.grammar is not None:
            raise ConfigError("there are a --json-schema and a --grammar: give one of them")
        if self.json_schema is not None:
            return Grammar.json_schema(_content(self.json_schema, "--json-schema", is_file="{" not in self.json_schema))
        if self.grammar is not None:
            return Grammar.lark(_content(self.grammar, "--grammar", is_file=":" not in self.grammar))
        return None


def _content(given: str, option: str, *, is_file: bool) -> str:
    from draftwing.text.grammar import LONGEST

    if not is_file and not os.path.isfile(given):  # which says no where a grammar is no name of a file
        return given
    try:
        with Path(given).open(encoding="utf-8") as stream:
            return stream.read(LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {shown(given)} cannot be read: give a file, or its content ({error})") from error


@with_options
def generate(
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    form: Form,
    beside: Shown,
    prompt: Annotated[str | None, typer.Argument(help="Or from --prompts, or from stdin.")] = None,
    prompts: Prompts = None,
    draft: Draft = None,
) -> None:
    """Continue a prompt; colours show how many drafted tokens were accepted at once.

    Examples:

    - `draftwing generate "def quicksort("`

    - `draftwing generate "def quicksort(" -T 0.8 --seed 7 -n 200 --compare`

    - `cat prompt.txt | draftwing generate -t path/or/hub-id -d lookup > continued.txt`

    - `draftwing generate --prompts prompts.jsonl --json`

    - `draftwing generate "Name a city." -t chat-model --json-schema '{"properties": {"city": {"type": "string"}}}'`
    """
    from draftwing.lab.report import describe_run, record

    drafting.check()
    checked, grammar = sampling.to_sampling(beside.logprobs), form.read()
    todo = _prompts_of(prompt, prompts)
    lm = model.load(draft, drafting)
    plain = type(lm)(lm.target, lm.tokenizer) if beside.compare else None
    lm.constraint(grammar)  # refused before anything is decoded
    ready = [sampling.put(each, lm.tokenizer) for each in todo]
    if plain is not None:  # first steps are slow, and both shall be spared them
        for method in (plain, lm):
            method.generate([ready[0]], checked, max_tokens=min(checked.max_tokens, 8), grammar=grammar)
    if beside.as_json:
        done = [lm.generate([each], checked, grammar=grammar)[0] for each in ready]
        records = [record(each, plain, checked, grammar) for each in done]
        screen.print_json({**describe_run(lm, checked), "generations": records})
        return
    echo = prompt if ready == [prompt] else None
    _show(lm, ready, checked, plain, grammar=grammar, echo=echo, profile=beside.profile)


def _show(
    lm: LM, prompts: Sequence[Prompt], sampling: Sampling, plain: LM | None, *,
    grammar: Grammar | None, echo: str | None, profile: bool,
) -> None:  # fmt: skip
    """Stream every text, and close each with its figures; ``echo`` is written in front."""
    from draftwing.lab.report import record

    screened = screen.Screen()
    for number, each in enumerate(prompts, 1):
        if len(prompts) > 1:
            screened.header(f"prompt {number} of {len(prompts)}")
        if echo is not None:
            screened.prompt(echo)
        try:
            (done,) = lm.generate(
                [each],
                sampling,
                grammar=grammar,
                on_step=lambda _, found: screened.write(found.text, found.step.rows[0].num_accepted),
            )
        finally:  # after Ctrl-C too
            screened.end_line()
        if done.logprobs is not None:
            screened.logprobs(done.logprobs, namer(lm))
        screened.closing(record(done, plain, sampling, grammar), profile=profile)
    if lm.drafter.drafts:
        screened.legend()


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
