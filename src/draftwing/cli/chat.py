"""``draftwing chat``: a conversation in the terminal, or one that a script pipes in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from draftwing.cli import screen
from draftwing.cli.drafts import Draft, drafts_at_hand
from draftwing.cli.options import CHAT_MODEL, ChatModel, ChatSampling, Drafting, with_options
from draftwing.cli.screen import format_alpha
from draftwing.errors import ConfigError, DraftwingError, PromptError, SamplingError, TokenizerError, shown
from draftwing.model.catalogue import entry_of

if TYPE_CHECKING:
    from draftwing.dialogue import Answer, Dialogue, Said
    from draftwing.stats import Stats

__all__ = ["Conversation", "register"]

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
    """Talk to a chat model. Tokens that were accepted at once from a draft are coloured.

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

    def _answer(self, ask: Callable[[Callable[[Said], None]], Answer]) -> None:
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

    def _show(self, said: Said) -> None:
        if not self._as_json:
            self._screen.pieces(said.pieces, said.num_accepted)

    def _close(self, answer: Answer) -> None:
        """One line under an answer."""
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
    """Of one answer or several, on one line."""
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


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(chat)
