"""``draftwing demo``: a chat model answers three questions plainly and with its best draft, side by side."""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from draftwing.cli import screen
from draftwing.cli.drafts import Draft
from draftwing.cli.options import ChatModel, Drafting, Json, sampling_option, with_options
from draftwing.cli.screen import new_console, printable, put_line, text_of
from draftwing.errors import CheckpointError
from draftwing.model.catalogue import entry_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from draftwing.dialogue import Answer, Said
    from draftwing.lm import LM

__all__ = ["register"]

QUESTIONS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that adds up the even numbers of a list.",
    "Write a short poem about the sea.",
)
TEMPERATURES = (0.0, 0.7)
_WARM_UP = 8  # tokens that each way decodes first: first steps are slow


@dataclass(frozen=True)
class Shown:
    """One answer, and the steps in which it came."""

    answer: Answer
    said: list[Said]


@dataclass(frozen=True)
class Totals:
    """The answers at one temperature together."""

    temperature: float
    draft: str
    plain_seconds: float
    draft_seconds: float
    plain_tokens_per_s: float
    draft_tokens_per_s: float
    tau: float
    num_identical: int
    num_questions: int

    @property
    def speedup(self) -> float:
        """By tokens/s of decoding."""
        return self.draft_tokens_per_s / self.plain_tokens_per_s


@with_options
def demo(
    model: ChatModel,
    draft: Draft = None,
    max_tokens: Annotated[int, sampling_option("Tokens of an answer at most.", "--max-tokens", "-n")] = 48,
    as_json: Json = False,
) -> None:
    """A chat model answers three questions, plainly and with its best draft, at temperature 0 and 0.7.

    Both texts are shown beside each other, what was accepted at once from a draft in colour. Where the model is not
    here and cannot be downloaded, that is said, and it is no failure. Exits with 1 where two texts differ.

    Examples:

    - `draftwing demo`

    - `draftwing demo --target path/or/hub-id --draft path/or/head -n 128`
    """
    entry = entry_of(model.target)
    if entry is not None and not _is_here(model.target):
        return
    lm = model.load(draft, Drafting())
    name = draft or (entry.best_head if entry is not None else None) or lm.drafter_name
    console, pairs = new_console(), []
    screen.line(f"{lm.target.name} answers {len(QUESTIONS)} questions, plainly and with {name}", "dim")
    for plain, drafted in _answers(lm, name, max_tokens):
        pairs.append((plain.answer, drafted.answer))
        if not as_json:
            _print_pair(console, plain, drafted)
    totals = [_totals(name, [pair for pair in pairs if pair[0].sampling.temperature == t]) for t in TEMPERATURES]
    if as_json:
        answers = [{"plain": plain.record(), "drafted": drafted.record()} for plain, drafted in pairs]
        rows = [{**asdict(each), "speedup": each.speedup} for each in totals]
        screen.print_json({"target": lm.target.name, "draft": name, "answers": answers, "totals": rows})
    else:
        _print_totals(console, lm.target.name, totals)
    if any(each.num_identical < each.num_questions for each in totals):
        raise typer.Exit(1)


def _is_here(target: str) -> bool:
    """Fetch a model of the catalogue where it is not here yet; where that fails, say so in one sentence."""
    from draftwing.model.catalogue import entry_named
    from draftwing.model.resolve import fetch

    for name, value in (("PIP_RETRIES", "1"), ("PIP_DEFAULT_TIMEOUT", "10")):
        os.environ.setdefault(name, value)  # nobody wants to wait minutes for a network that does not answer
    try:
        fetch(entry_named(target))
    except CheckpointError as error:
        screen.line(f"The chat model is left out, as it cannot be fetched: {' '.join(str(error).split())}", "yellow")
        return False
    return True


def _answers(lm: LM, name: str, max_tokens: int) -> Iterator[tuple[Shown, Shown]]:
    """Every question at every temperature: plainly, and drafted. Which of them comes first takes turns."""
    from draftwing.lm import LM
    from draftwing.sampling import Sampling

    both = {"none": LM(lm.target, lm.tokenizer), name: lm}
    sampling = Sampling(max_tokens=max_tokens, seed=1)
    for way, each in both.items():
        _answer(each, way, QUESTIONS[0], replace(sampling, max_tokens=min(_WARM_UP, max_tokens)))
    turns = itertools.cycle((list(both), list(reversed(both))))
    for temperature, question in itertools.product(TEMPERATURES, QUESTIONS):
        drawn = replace(sampling, temperature=temperature)
        found = {way: _answer(both[way], way, question, drawn) for way in next(turns)}
        yield found["none"], found[name]


def _answer(lm: LM, way: str, question: str, sampling: Any) -> Shown:
    from draftwing.dialogue import Dialogue

    said: list[Said] = []
    return Shown(Dialogue(lm, way, sampling).ask(question, said.append), said)


def _totals(draft: str, pairs: list[tuple[Answer, Answer]]) -> Totals:
    from draftwing.stats import Stats

    plain, drafted = ([pair[side] for pair in pairs] for side in (0, 1))
    plain_stats, draft_stats = (Stats.sum(answer.stats for answer in side) for side in (plain, drafted))
    return Totals(
        temperature=plain[0].sampling.temperature,
        draft=draft,
        plain_seconds=sum(answer.seconds for answer in plain),
        draft_seconds=sum(answer.seconds for answer in drafted),
        plain_tokens_per_s=plain_stats.tokens_per_s,
        draft_tokens_per_s=draft_stats.tokens_per_s,
        tau=draft_stats.tau,
        num_identical=sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True)),
        num_questions=len(pairs),
    )


def _print_pair(console: Console, plain: Shown, drafted: Shown) -> None:
    """A question, and under it both answers."""
    put_line(console, f"\n{plain.answer.question}  (temperature {plain.answer.sampling.temperature:g})", "bold")
    table = Table(expand=console.is_terminal, padding=(0, 1))
    for title, each in (("plain decoding", plain), (drafted.answer.draft, drafted)):
        answer = each.answer
        table.add_column(Text(printable(f"{title}: {answer.seconds:.2f} s, {answer.stats.tokens_per_s:.0f} tokens/s")))
    table.add_row(*(text_of(each.said) for each in (plain, drafted)))
    console.print(table)


def _print_totals(console: Console, target: str, totals: list[Totals]) -> None:
    """A row for each temperature."""
    table = Table("", title=None)
    for name in ("plain decoding", "drafted", "speedup", "tau", "same text"):
        table.add_column(name, justify="right")
    for each in totals:
        table.add_row(
            Text(f"temperature {each.temperature:g}, {each.draft}"),
            f"{each.plain_seconds:.1f} s, {each.plain_tokens_per_s:.0f} tokens/s",
            f"{each.draft_seconds:.1f} s, {each.draft_tokens_per_s:.0f} tokens/s",
            f"{each.speedup:.2f}x",
            f"{each.tau:.2f}",
            f"{each.num_identical} of {each.num_questions}",
        )
    put_line(console, f"\n{printable(target)}: seconds with the prompt, tokens/s without it", "bold")
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(demo)
