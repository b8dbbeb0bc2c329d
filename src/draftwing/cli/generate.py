"""``draftwing generate``: continue a prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from draftwing.cli import screen
from draftwing.cli.options import DRAFT, JSON, PROMPTS, Drafting, Model, SamplingOptions, argument, option, with_options
from draftwing.cli.progress import progress
from draftwing.cli.screen import format_figures, print_table
from draftwing.errors import ConfigError, PromptError, shown
from draftwing.remote import download

if TYPE_CHECKING:
    from draftwing.lm import LM
    from draftwing.text.grammar import Grammar
    from draftwing.text.prompts import Prompt


@dataclass(frozen=True)
class ConstraintOptions:
    PANEL: ClassVar = "Sampling"

    json_schema: str | None = option(None, "Output JSON that follows this schema: a file, or the schema itself.")
    grammar: str | None = option(None, "Output text that follows this Lark grammar: a file, or the grammar itself.")

    def read(self) -> Grammar | None:
        from draftwing.text.grammar import Grammar

        if self.json_schema is not None and self.grammar is not None:
            raise ConfigError("found both --json-schema and --grammar: give one of them")
        if self.json_schema is not None:
            return Grammar.json_schema(_content(self.json_schema, "--json-schema", is_file="{" not in self.json_schema))
        if self.grammar is not None:
            return Grammar.lark(_content(self.grammar, "--grammar", is_file=":" not in self.grammar))
        return None


def _content(given: str, option: str, *, is_file: bool) -> str:
    from draftwing.text.grammar import MAX_CHARACTERS

    if not is_file and not os.path.isfile(given):  # unlike Path.is_file, it returns False for a grammar of any form
        return given
    try:
        with Path(given).open(encoding="utf-8") as stream:
            return stream.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {shown(given)} cannot be read: give a file, or its content ({error})") from error


@with_options
def generate(
    model: Model,
    drafting: Drafting,
    sampling: SamplingOptions,
    constraint: ConstraintOptions,
    prompt: str | None = argument(None, "The prompt, - for stdin; or use --prompts."),
    prompts: str | None = PROMPTS,
    draft: str | None = DRAFT,
    logprobs: int | None = option(None, "Show log-probabilities of each token and the N best.", panel="Sampling"),
    as_json: bool = JSON,
) -> None:
    """Continue a prompt; colours show how many drafted tokens were accepted at once.

    Examples:

    - `draftwing generate "def quicksort("`
    - `draftwing generate "def quicksort(" -T 0.8 --seed 7 -n 200`
    - `cat prompt.txt | draftwing generate -t path/or/hub-id -d lookup > continued.txt`
    - `draftwing generate --prompts prompts.jsonl --json`
    - `draftwing generate "Who wrote Hamlet?" --json-schema schema.json`
    """
    from draftwing.lab.machine import describe_run, record

    checked, grammar = sampling.to_sampling(logprobs), constraint.read()
    given = _read(prompt, prompts)
    lm, output = model.load(draft, drafting), screen.Screen()
    lm.constraint(grammar)  # refused before anything is decoded
    encoded = sampling.encode_all(given, lm)
    if as_json:
        generations = [lm.generate([ids], checked, grammar=grammar)[0] for ids in encoded]
        screen.print_json({**describe_run(lm, checked), "generations": list(map(record, generations))})
        return
    for number, ids in enumerate(encoded, 1):
        if len(encoded) > 1:
            output.note(f"prompt {number} of {len(encoded)}")
        if prompt not in (None, "-") and sampling.put(prompt, lm.tokenizer) == prompt:
            output.prompt(prompt)
        try:
            (done,) = lm.generate(
                [ids],
                checked,
                grammar=grammar,
                on_step=lambda _, step: output.write(step.text, step.step.rows[0].num_accepted),
            )
        finally:  # after Ctrl-C too
            output.end_line()
        if done.logprobs is not None:
            name = token_namer(lm)
            entries = [
                {
                    "token": name(entry.token),
                    "logprob": entry.logprob,
                    "top": "  ".join(f"{name(token)} {value:.3f}" for token, value in entry.top),
                }
                for entry in done.logprobs
            ]
            print_table(entries, "token: {token} | logprob: {logprob:.3f} | top: {top}", output.info)
        output.note(" | ".join(format_figures(record(done))))
    if lm.drafter.drafts:
        output.legend()


def token_namer(lm: LM) -> Callable[[int], str]:
    """Return a function that gives a token's text by its id."""
    return lambda token: repr(lm.tokenizer.decode([token], skip_special_tokens=False))


def _read(prompt: str | None, file: str | None) -> Sequence[Prompt]:
    from draftwing.text.prompts import check_text, read_prompts

    if prompt is not None and file is not None:
        raise PromptError("found two prompts: give either the argument or --prompts")
    if file is not None:
        download([file], progress)
        return read_prompts(file)
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin is not None and sys.stdin.isatty():
            raise PromptError("there is no prompt: give one as the argument, with --prompts FILE, or on stdin")
        return read_prompts("-")
    if not prompt:
        raise PromptError("the prompt is empty: give some text to continue")
    return [check_text(prompt)]
