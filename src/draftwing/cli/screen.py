"""What the command line shows: streamed text, closing lines, tables, progress and errors.

Model text never passes through rich's markup, and control characters in it never reach a terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from draftwing.errors import DraftwingWarning

if TYPE_CHECKING:
    from draftwing.evaluate.compare import Comparison, MethodResult
    from draftwing.evaluate.lossless import Verification
    from draftwing.evaluate.predict import Predictions
    from draftwing.stats import Logprob

__all__ = [
    "Screen",
    "error",
    "print_comparison",
    "print_info",
    "print_json",
    "print_predictions",
    "print_verification",
    "printable",
    "progress",
    "quiet",
    "silence",
]

# By how many drafted tokens a step kept; the last is for that many and more.
STYLES = tuple(map(Style.parse, ("dim", "cyan", "green", "yellow", "bold magenta")))
# Files and pipes have no width; a table in them should not be folded.
FILE_WIDTH = 160
# Control characters as their pictures: a model may write an escape sequence, a terminal must not obey it.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def printable(text: str) -> str:
    """``text`` with control characters (but newlines and tabs) made visible."""
    return text.translate(_PICTURES)


def _console(*, stderr: bool = False) -> Console:
    """A console on what ``sys.stdout`` or ``sys.stderr`` is now."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=FILE_WIDTH)


def _line(console: Console, text: str | Text, style: str = "") -> None:
    """One line, neither folded nor read as markup."""
    console.print(Text(printable(text), style=style) if isinstance(text, str) else text, soft_wrap=True)


def error(message: str) -> None:
    """One red line on stderr."""
    _line(_console(stderr=True), f"error: {' '.join(message.split())}", "red")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A ``warnings.showwarning`` that gives Draftwing's own warnings as one line."""
    if issubclass(category, DraftwingWarning):
        _line(_console(stderr=True), f"warning: {' '.join(str(message).split())}", "yellow")
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


@contextmanager
def quiet() -> Iterator[None]:
    """Draftwing's warnings as one line each, for the duration."""
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        yield


def silence() -> None:
    """The reader of stdout went away: let nothing that is still buffered complain about it."""
    with suppress(OSError, ValueError):  # a stdout that is no file has no reader to lose
        number = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def print_json(value: Mapping[str, Any]) -> None:
    """Strict JSON on stdout; infinities and NaN, which JSON has not, become null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False, default=str), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal; yields what to call with (done, total)."""
    console = _console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- generate --------------------------------------------------------------------------------------------------------


class Screen:
    """Where ``generate`` writes: text on stdout, everything about it on stdout too if that is a terminal."""

    def __init__(self) -> None:
        self._out = _console()
        self.is_terminal = self._out.is_terminal
        self._info = self._out if self.is_terminal else _console(stderr=True)
        self._at_line_start = True

    def header(self, text: str) -> None:
        """A dim line about what follows."""
        _line(self._info, text, "dim")

    def prompt(self, text: str) -> None:
        """The prompt in front of its continuation, on a terminal only."""
        if self.is_terminal:
            self._segment(text, Style.parse("bold"))

    def write(self, text: str, num_accepted: int) -> None:
        """The text of one step, at once and exactly; coloured on a terminal."""
        if not text:
            return
        if self.is_terminal:
            self._segment(text, STYLES[min(num_accepted, len(STYLES) - 1)])
        else:
            self._at_line_start = text.endswith("\n")
            sys.stdout.write(text)
            sys.stdout.flush()

    def _segment(self, text: str, style: Style) -> None:
        self._at_line_start = text.endswith("\n")  # before writing: Ctrl-C may come in between
        # A segment, not a Text: rich would expand tabs and strip spaces.
        self._out.print(Segments([Segment(printable(text), style)]), crop=False, end="")
        self._out.file.flush()

    def end_line(self) -> None:
        """Close the text's last line, where it is open."""
        if not self._at_line_start:
            print(flush=True)
        self._at_line_start = True

    def legend(self) -> None:
        """What the colours mean, where there are any."""
        if not self.is_terminal or self._out.no_color or self._out.color_system is None:
            return
        names = [str(number) for number in range(len(STYLES))]
        names[-1] += "+"
        _line(self._out, Text(" ").join([Text("accepted at once:"), *map(Text, names, STYLES)]))

    def closing(self, record: Mapping[str, Any], *, profile: bool = False) -> None:
        """Speed and acceptance of one generation in one line; ``record`` as in ``--json``. And where time went."""
        parts = [f"{len(record['token_ids'])} tokens", f"{record['tokens_per_s']:.1f} tokens/s"]
        parts.append(f"tau {record['tau']:.2f}")
        if record["alpha"]:
            parts.append(f"acceptance {record['acceptance']:.0%} (by depth {format_alpha(record['alpha'])})")
        plain = record.get("plain")
        if plain:
            parts.append(f"speedup {plain['speedup']:.2f}x over {plain['tokens_per_s']:.1f} tokens/s")
            parts.append(f"efficiency {plain['efficiency']:.2f}")
            parts.append(f"identical {'yes' if plain['identical'] else 'no'}")
        if not record["lossless"]:
            parts.append("LOSSY: not the target's own text")
        _line(self._info, " | ".join(parts), "dim")
        if profile:
            total, steps = sum(record["seconds"].values()), record["num_steps"]
            table = Table("phase", box=None, pad_edge=False)
            for name in ("ms per step", "share"):
                table.add_column(name, justify="right")
            for phase, seconds in [*record["seconds"].items(), ("all", total)]:
                table.add_row(phase, f"{1e3 * seconds / max(steps, 1):.2f}", f"{seconds / total:.0%}")
            self._info.print(table)

    def logprobs(self, logprobs: Sequence[Logprob], name_of: Callable[[int], str]) -> None:
        """A table of the target's log-probabilities; ``name_of`` gives a token's text."""
        table = Table("token", "logprob", "top")
        for entry in logprobs:
            top = "  ".join(f"{name_of(token)} {value:.3f}" for token, value in entry.top)
            table.add_row(Text(name_of(entry.token)), f"{entry.logprob:.3f}", Text(top))
        self._info.print(table)


def format_alpha(alpha: Sequence[float]) -> str:
    """Acceptance by depth in as little room as two digits take."""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in alpha)


# --- compare, verify, info -------------------------------------------------------------------------------------------


def print_comparison(comparison: Comparison, note: str = "", *, texts: bool = False) -> None:
    """One table, and under it what it was measured against and on; ``texts`` of the first prompt above it."""
    console = _console()
    if texts:
        rates = {method.name: f"{method.tokens_per_s:.0f} tokens/s" for method in comparison.methods}
        for name, text in comparison.texts.items():
            title = Text(f"{'plain decoding' if name == 'none' else printable(name)}: {rates[name]}")
            console.print(Panel(Text(printable(text.strip("\n"))), title=title, title_align="left", expand=False))
    table = Table("drafter")
    for name in ("tokens/s", "speedup", "tau", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("alpha by depth")
    table.add_column("text identical")
    for index, method in enumerate(comparison.methods):
        table.add_row(
            Text(printable(method.name) if index else "none (plain decoding)"),
            f"{method.tokens_per_s:.1f}",
            f"{method.speedup:.2f}x",
            f"{method.tau:.2f}",
            f"{method.efficiency:.2f}",
            format_alpha(method.alpha) or "-",
            _identical(method) if index else "baseline",
        )
    console.print(table)
    settings, machine = dict(comparison.settings), dict(comparison.machine)
    rules, budgets = settings.pop("rules", {}), settings.pop("budgets", {})
    _line(console, f"baseline: {comparison.baseline}", "dim")
    _line(console, f"settings: {_pairs(settings)}", "dim")
    for name in rules:
        _line(console, f"{name}: rule {rules[name]}, tree {budgets.get(name, '')}", "dim")
    _line(console, f"machine: {_pairs(machine)}", "dim")
    if note:
        _line(console, note)


def _identical(method: MethodResult) -> Text:
    same = method.num_identical == method.num_prompts
    text = f"{'yes' if same else 'no'} ({method.num_identical} of {method.num_prompts})"
    if method.promise == "law":  # a classic rule draws with other noise: other texts, by the same law
        return Text(f"same law ({method.num_identical} of {method.num_prompts} texts)")
    return Text(text if method.lossless else f"{text}, LOSSY rule", style="green" if same else "red")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items() if value not in (None, {}))


def print_verification(verification: Verification, name_of: Callable[[int], str]) -> None:
    """The summary and every difference. ``name_of`` gives a token's text."""
    console = _console()
    v, settings = verification, dict(verification.settings)
    sampling = _pairs(settings.pop("sampling", {})) or "greedy"
    _line(
        console,
        f"{v.num_identical} of {v.num_prompts} texts identical to plain decoding's ({v.num_tokens} tokens compared)",
        "green" if not v.differences else "red",
    )
    _line(console, f"settings: {_pairs(settings)}, sampling: {sampling}", "dim")
    if not v.differences:
        return
    table = Table("prompt", "position", "plain token", "drafted token", "margin", "noise", "verdict")
    for each in v.differences:
        table.add_row(
            str(each.prompt_index + 1),
            str(each.position),
            Text(_token(each.plain_token, name_of)),
            Text(_token(each.token, name_of)),
            f"{each.margin:.2e}",
            f"{each.noise:.2e}",
            Text("a tie within the rounding noise" if each.is_tie else "DIFFERENT", "yellow" if each.is_tie else "red"),
        )
    console.print(table)


def _token(token: int, name_of: Callable[[int], str]) -> str:
    return f"{name_of(token)} ({token})" if token >= 0 else "the end"


def print_predictions(found: Predictions) -> None:
    """The formulas' figures beside the measured ones, a row for each chain length."""
    console = _console()
    table = Table("chain")
    columns = ("tau formula", "tau", "speedup, c alone", "with T_V", "speedup", "operations", "memory", "gains from")
    for name in columns:
        table.add_column(name, justify="right")
    for each in found.chains:
        start = "never" if each.inflection is None else "start" if not each.inflection else f"{each.inflection:.0f}"
        figures = (each.tau_predicted, each.tau, each.paper, each.measured_costs, each.speedup, each.operations)
        shown = [f"{value:.2f}" for value in (*figures, each.memory)]
        table.add_row(str(each.gamma), *shown, start)
    table.add_row("auto", "", f"{found.auto['tau']:.2f}", "", "", f"{found.auto['speedup']:.2f}", "", "", "")
    console.print(table)
    verdict = "above c: drafting pays" if found.pays else "not above c: drafting does not pay"
    _line(
        console,
        f"{printable(found.drafter)}: alpha {found.alpha:.2f} (acceptance of a token), c {found.c:.2f} (draft step / "
        f"target forward), alpha {verdict}; best chain by the formula {found.best_gamma}",
    )
    _line(
        console,
        f"baseline: plain decoding, {found.plain_tokens_per_s:.1f} tokens/s; 'with T_V' counts what verifying more "
        f"nodes takes here; 'gains from' is in tokens of context",
        "dim",
    )
    _line(console, f"machine: {_pairs(found.machine)}", "dim")


def print_info(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Named groups of names and values."""
    console = _console()
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, values in sections.items():
        table.add_row(f"[bold]{escape(title)}[/bold]", "")
        for name, value in values.items():
            shown = "none" if value is None else f"{value:,}" if type(value) is int and value > 9999 else str(value)
            table.add_row(Text(f"  {name.replace('_', ' ')}"), Text(printable(shown)))
    console.print(table)
