"""``draftwing predict``: what a head will bring on this machine, before anything is decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwing.cli import screen
from draftwing.cli import screen as tables
from draftwing.cli.options import (
    Draft,
    Drafting,
    Examples,
    Json,
    Model,
    Prompts,
    SamplingOptions,
    head_folder,
    with_options,
)
from draftwing.cli.progress import progress
from draftwing.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from draftwing.lab.forecast import Forecast, HeldOut
    from draftwing.lm import LM
    from draftwing.methods.base import Budget
    from draftwing.text.prompts import Prompt


TREES = ("chain:3", "chain:5", "static", "dynamic:24,6,4", "dynamic:59,8,10", "auto")
COLLECTED, MEASURED, FORMULAS = 40, 20, 4  # prompts, where the user names no number


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be forecast, and how."""

    tree: Annotated[
        list[str] | None,
        typer.Option("--tree", help=f"As in compare; repeatable. [default: {' '.join(TREES)}]"),
    ] = None
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-T", help="Of those that the statistics cover; repeatable. [default: all]"),
    ] = None
    measure: Annotated[
        bool, typer.Option("--measure", help="Decode the prompts too, and show what is measured beside the forecast.")
    ] = False
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Of each text, with --measure.")] = 128
    collect: Annotated[
        bool,
        typer.Option("--collect", help="First collect the head's statistics on the prompts, and keep them beside it."),
    ] = False
    tau_only: Annotated[
        bool, typer.Option("--tau-only", help="Load no model and measure no costs: tau from the head's folder alone.")
    ] = False
    formulas: Annotated[
        bool, typer.Option("--formulas", help="The papers' formulas for chains instead, beside what is measured.")
    ] = False
    new_costs: Annotated[bool, typer.Option("--new-costs", help="Measure this machine's costs anew.")] = False

    def trees(self) -> dict[str, Budget | None]:
        """The budgets by name; None is auto."""
        named = self.tree or [each for each in TREES if not (each == "auto" and self.tau_only)]
        return {each: Drafting(tree=each).budget() for each in named}

    def check(self) -> None:
        """Refuse options that exclude each other. Raises ConfigError."""
        pairs = [
            ("--tau-only", "--measure", self.tau_only and self.measure),
            ("--tau-only", "--collect", self.tau_only and self.collect),
            ("--collect", "--measure", self.collect and self.measure),  # on the same prompts nothing would be foretold
            ("--formulas", "--tau-only", self.formulas and self.tau_only),
            ("--formulas", "--collect", self.formulas and self.collect),
            ("--formulas", "--tree", self.formulas and bool(self.tree)),
        ]
        for one, other, both in pairs:
            if both:
                raise ConfigError(f"{one} and {other} exclude each other: leave one of them out")


@dataclasses.dataclass(frozen=True)
class Sample:
    """What is collected or measured on."""

    prompts: Prompts = None
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            min=1,
            help=f"Use the first so many prompts. [default: {COLLECTED} with --collect, {MEASURED} with --measure, "
            f"{FORMULAS} with --formulas]",
        ),
    ] = None

    def read(self, target: str | None, default: int) -> Sequence[Prompt]:
        return Examples(self.prompts, self.num_prompts or default).read(target)


@with_options
def predict(
    model: Model,
    question: Question,
    examples: Sample,
    draft: Draft = None,
    as_json: Json = False,
) -> None:
    """Predict tau and speedup of a head for any tree, from its held-out statistics and this machine's costs.

    Training leaves the statistics in the head's folder; --collect makes them for any other head.

    Examples:

    - `draftwing predict`

    - `draftwing predict --tree chain:5 --tree dynamic:59,8,10 -T 0 --measure --num-prompts 20`

    - `draftwing predict -t path/or/hub-id -d path/or/head --collect --prompts held-out.jsonl`

    - `draftwing predict --formulas -T 1`
    """
    question.check()
    if question.formulas:
        _formulas(model, question, examples, draft, as_json=as_json)
        return
    trees, folder = question.trees(), head_folder(model.target, draft)
    if question.tau_only:
        from draftwing.lab.forecast import HeldOut

        held_out = HeldOut.read(folder)
        _show(_forecast(held_out, trees, question), held_out, None, as_json=as_json)
        return
    todo = _prompts(model, examples, question)
    lm = model.load(str(folder), Drafting())
    held_out = _held_out(lm, folder, todo, question)
    with progress("measuring this machine's costs"):
        lm.costs(again=question.new_costs)
    found = _forecast(held_out, trees, question, lm)
    if question.measure:
        found = _measured(found, lm, trees, todo, question)
    _show(found, held_out, lm, as_json=as_json)


def _prompts(model: Model, examples: Sample, question: Question) -> Sequence[Prompt]:
    if not (question.collect or question.measure):
        return ()
    if question.collect and examples.prompts is None and model.target is not None:
        raise ConfigError(
            "--collect needs held-out prompts of the kind that the head is for: give some 40 with --prompts"
        )
    return examples.read(model.target, COLLECTED if question.collect else MEASURED)


def _held_out(lm: LM, folder: Path, todo: Sequence[Prompt], question: Question) -> HeldOut:
    from draftwing.formats.identity import head_id
    from draftwing.lab.forecast import HeldOut, collect

    if not question.collect:
        return HeldOut.read(folder)
    ids = [lm.encode(SamplingOptions().put(each, lm.tokenizer)) for each in todo]
    with progress("collecting") as on_progress:
        found = collect(
            lm.target, lm.new_drafter, head_id(folder), ids, question.temperature or (0.0, 1.0), on_progress=on_progress
        )
    with suppress(CheckpointError):  # there are none yet, or they are of other weights
        found = found.joined(HeldOut.read(folder))
    screen.line(f"wrote {found.write(folder)}")
    return found


def _forecast(
    held_out: HeldOut, trees: Mapping[str, Budget | None], question: Question, lm: LM | None = None
) -> list[Forecast]:
    from draftwing.lab.forecast import forecast

    temperatures = question.temperature or sorted(held_out.texts)
    return forecast(held_out, trees, temperatures, None if lm is None else lm.costs())


def _measured(
    found: list[Forecast], lm: LM, trees: Mapping[str, Budget | None], todo: Sequence[Prompt], question: Question
) -> list[Forecast]:
    from draftwing.lab.forecast import measured
    from draftwing.sampling import Sampling

    ready = [SamplingOptions().put(each, lm.tokenizer) for each in todo]
    with progress("decoding") as on_progress:
        return measured(found, lm, trees, ready, Sampling(max_tokens=question.max_tokens), on_progress=on_progress)


def _show(found: Sequence[Forecast], held_out: HeldOut, lm: LM | None, *, as_json: bool) -> None:
    from draftwing.lab.machine import describe_machine

    machine = None if lm is None else describe_machine()
    if as_json:
        forecasts = [each.to_dict() for each in found]
        screen.print_json({"forecasts": forecasts, "statistics": held_out.describe(), "machine": machine})
    else:
        tables.print_forecasts(found, held_out.describe(), machine)


def _formulas(model: Model, question: Question, examples: Sample, draft: str | None, *, as_json: bool) -> None:
    from draftwing.lab.forecast import predict as find
    from draftwing.sampling import Sampling

    temperatures = question.temperature or [0.0]
    if len(temperatures) > 1:
        raise ConfigError("--formulas takes one temperature: give -T once")
    sampling = Sampling(temperature=temperatures[0], max_tokens=question.max_tokens)
    todo = examples.read(model.target, FORMULAS)
    lm = model.load(draft, Drafting())
    ready = [SamplingOptions().put(each, lm.tokenizer) for each in todo]
    with progress("measuring") as on_progress:
        lm.costs(again=question.new_costs)
        found = find(lm, ready, sampling, on_progress=on_progress)
    if as_json:
        screen.print_json(found.to_dict())
    else:
        tables.print_predictions(found)
