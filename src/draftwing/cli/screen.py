"""What the command line shows: streamed text and its closing lines, messages and errors.

Model text never passes through rich's markup, and control characters in it never reach a terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from draftwing.errors import DraftwingWarning

if TYPE_CHECKING:
    from draftwing.dialogue import Said
    from draftwing.formats.doctor import Finding
    from draftwing.lab.compare import Comparison, MethodResult, Verification
    from draftwing.lab.fit import Fit
    from draftwing.lab.forecast import Forecast, Predictions
    from draftwing.stats import Logprob


# By how many drafted tokens a step kept; the last is for that many and more.
STYLES = tuple(map(Style.parse, ("dim", "cyan", "green", "yellow", "bold magenta")))
# Files and pipes have no width; a table in them should not be folded.
FILE_WIDTH = 160
# Control characters as their pictures: a model may write an escape sequence, a terminal must not obey it.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),  # bytes of an argument that are not UTF-8
}


def printable(text: str) -> str:
    """``text`` with control characters (but newlines and tabs) made visible."""
    return text.translate(_PICTURES)


def new_console(*, stderr: bool = False) -> Console:
    """A console on what ``sys.stdout`` or ``sys.stderr`` is now."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=FILE_WIDTH)


def line(text: str, style: str = "") -> None:
    """One line on stderr: what is going on."""
    put_line(new_console(stderr=True), text, style)


def put_line(console: Console, text: str | Text, style: str = "") -> None:
    """One line, neither folded nor read as markup."""
    console.print(Text(printable(text), style=style) if isinstance(text, str) else text, soft_wrap=True)


def error(message: str) -> None:
    """One red line on stderr."""
    line(f"error: {' '.join(message.split())}", "red")


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
        put_line(new_console(stderr=True), f"warning: {' '.join(str(message).split())}", "yellow")
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
    print(to_json(value), flush=True)


def to_json(value: Mapping[str, Any]) -> str:
    """The same as text."""
    return json.dumps(_finite(value), indent=2, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- generate --------------------------------------------------------------------------------------------------------


def text_of(said: Iterable[Said]) -> Text:
    """The steps of a whole answer, coloured as ``Screen.pieces`` colours each."""
    text = Text(overflow="fold")
    for step in said:
        accepted = STYLES[min(step.num_accepted, len(STYLES) - 1)]
        for piece in step.pieces:
            text.append(printable(piece.text), accepted if piece.is_drafted else Style.null())
    text.rstrip()
    return text


class Screen:
    """Where ``generate`` and ``chat`` write: text on stdout, all about it on stdout too if that is a terminal.

    Args:
        console: on stdout where it is left out.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._out = console or new_console()
        self.is_terminal = self._out.is_terminal
        self._info = self._out if self.is_terminal else new_console(stderr=True)
        self._at_line_start = True

    def header(self, text: str) -> None:
        """A dim line about what follows."""
        put_line(self._info, text, "dim")

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

    def pieces(self, pieces: Iterable[tuple[str, bool]], num_accepted: int) -> None:
        """The text of one step in pieces, each with whether it was drafted: only those are coloured."""
        accepted = STYLES[min(num_accepted, len(STYLES) - 1)]
        parts = [(text, accepted if drafted else Style.null()) for text, drafted in pieces]
        if self.is_terminal and parts:
            self._segments(parts)
        else:
            self.write("".join(text for text, _ in parts), num_accepted)

    def _segment(self, text: str, style: Style) -> None:
        self._segments([(text, style)])

    def _segments(self, parts: Sequence[tuple[str, Style]]) -> None:
        self._at_line_start = parts[-1][0].endswith("\n")  # before writing: Ctrl-C may come in between
        # Segments, not a Text: rich would expand tabs and strip spaces.
        self._out.print(Segments([Segment(printable(text), style) for text, style in parts]), crop=False, end="")
        self._out.file.flush()

    def note(self, text: str, style: str = "dim") -> None:
        """A line about the text; on stderr where stdout is no terminal."""
        put_line(self._info, text, style)

    def end_line(self) -> None:
        """Close the text's last line, where it is open."""
        if not self._at_line_start:
            self._out.print()
        self._at_line_start = True

    def legend(self, title: str = "accepted at once:", first: int = 0) -> None:
        """What the colours mean, where there are any; ``first`` leaves out those of fewer accepted tokens."""
        if not self.is_terminal or self._out.no_color or self._out.color_system is None:
            return
        names = [str(number) for number in range(len(STYLES))]
        names[-1] += "+"
        put_line(self._out, Text(" ").join([Text(title), *map(Text, names[first:], STYLES[first:])]))

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
        put_line(self._info, " | ".join(parts), "dim")
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


# The tables that commands print: comparisons, verifications, predictions, descriptions and a doctor's findings.


# What the classic rules promise at a temperature above 0.
LAW_ALONE = "at a temperature above 0 this rule keeps the law of the text, not the text itself"
_STATUS = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}


def print_comparison(comparison: Comparison, *, texts: bool = False) -> None:
    """One table, and under it what it was measured against and on; ``texts`` of the first prompt above it."""
    law_alone = any(method.promise == "law" for method in comparison.methods)
    console = new_console()
    if texts:
        rates = {method.name: f"{method.tokens_per_s:.0f} tokens/s" for method in comparison.methods}
        for index, (name, text) in enumerate(comparison.texts.items()):
            title = Text(f"{printable(name) if index else 'plain decoding'}: {rates[name]}")
            console.print(Panel(Text(printable(text.strip("\n"))), title=title, title_align="left", expand=False))
    table = Table("drafter")
    for name in ("tokens/s", "speedup", "tau", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("alpha by depth")
    table.add_column("text" if law_alone else "text identical")
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
    put_line(console, f"baseline: {comparison.baseline}", "dim")
    put_line(console, f"settings: {_pairs(settings)}", "dim")
    for name in rules:
        put_line(console, f"{name}: rule {rules[name]}, tree {budgets.get(name, '')}", "dim")
    put_line(console, f"machine: {_pairs(machine)}", "dim")
    if law_alone:
        put_line(console, f"text: {LAW_ALONE}, so that texts differ from plain decoding's as those of two seeds do")


def _identical(method: MethodResult) -> Text:
    same = method.num_identical == method.num_prompts
    if method.promise == "law":
        return Text(f"same law, {'same' if same else 'other'} text", style="green")
    text = f"{'yes' if same else 'no'} ({method.num_identical} of {method.num_prompts})"
    return Text(text if method.lossless else f"{text}, LOSSY rule", style="green" if same else "red")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items() if value not in (None, {}))


def print_verification(verification: Verification, name_of: Callable[[int], str]) -> None:
    """The summary and every difference. ``name_of`` gives a token's text."""
    console = new_console()
    v, settings = verification, dict(verification.settings)
    sampling = _pairs(settings.pop("sampling", {})) or "greedy"
    put_line(
        console,
        f"{v.num_identical} of {v.num_prompts} texts identical to plain decoding's ({v.num_tokens} tokens compared)",
        "green" if not v.differences else "red",
    )
    put_line(console, f"settings: {_pairs(settings)}, sampling: {sampling}", "dim")
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


def print_models(rows: Sequence[Mapping[str, Any]]) -> None:
    """The models that have a name, each as ``models --json`` describes it; under the table, where they lie."""
    console = new_console()
    table = Table("name")
    table.add_column("parameters", justify="right")
    table.add_column("licence")
    table.add_column("source")
    table.add_column("size", justify="right")
    table.add_column("here")
    table.add_column("heads")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['num_parameters'] / 1e6:.0f}M",
            row["licence"],
            row["source"],
            f"{row['num_bytes'] / 1e6:,.0f} MB",
            "yes" if row["path"] else "no",
            ", ".join(row["heads"]) or "-",
        )
    console.print(table)
    for row in rows:
        if row["path"]:
            put_line(console, f"{row['name']}: {row['path']}", "dim")


def _token(token: int, name_of: Callable[[int], str]) -> str:
    return f"{name_of(token)} ({token})" if token >= 0 else "the end"


def print_predictions(found: Predictions) -> None:
    """The formulas' figures beside the measured ones, a row for each chain length."""
    console = new_console()
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
    put_line(
        console,
        f"{printable(found.drafter)}: alpha {found.alpha:.2f} (acceptance of a token), c {found.c:.2f} (draft step / "
        f"target forward), alpha {verdict}; best chain by the formula {found.best_gamma}",
    )
    put_line(
        console,
        f"baseline: plain decoding, {found.plain_tokens_per_s:.1f} tokens/s; 'with T_V' counts what verifying more "
        f"nodes takes here; 'gains from' is in tokens of context",
        "dim",
    )
    put_line(console, f"machine: {_pairs(found.machine)}", "dim")


def print_forecasts(
    found: Sequence[Forecast], statistics: Mapping[str, Any], machine: Mapping[str, Any] | None
) -> None:
    """A row for each temperature and tree: forecast, and measured where something was decoded."""
    console = new_console()
    is_measured = any(each.measured_tau is not None for each in found)
    table = Table("T", "tree")
    for name in ("tau", "95%", "nodes", "levels", "speedup"):
        table.add_column(name, justify="right")
    if is_measured:
        for name in ("tau measured", "error", "speedup measured"):
            table.add_column(name, justify="right")
    for each in found:
        speedup = "" if each.speedup is None else f"{each.speedup:.2f}"
        values = [f"{each.tau:.2f}", f"{each.tau_low:.2f}-{each.tau_high:.2f}", f"{each.nodes:.1f}"]
        values += [f"{each.levels:.1f}", speedup]
        if each.measured_tau is not None and each.error is not None:
            values += [f"{each.measured_tau:.2f}", f"{each.error:+.1%}", f"{each.measured_speedup:.2f}"]
        table.add_row(f"{each.temperature:g}", Text(printable(each.tree)), *values)
    console.print(table)
    texts = ", ".join(f"{count} texts at T={name}" for name, count in statistics["texts"].items())
    put_line(
        console,
        f"from held-out statistics: {texts}, target {printable(statistics['target'])}, drafts by "
        f"{printable(statistics['runs_as'] or 'PyTorch')}; auto is an approximation",
        "dim",
    )
    if machine is not None:
        put_line(console, f"speedup over plain decoding at batch 1; machine: {_pairs(machine)}", "dim")


def print_info(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Named groups of names and values."""
    console = new_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, values in sections.items():
        table.add_row(f"[bold]{escape(title)}[/bold]", "")
        for name, value in values.items():
            shown = "none" if value is None else f"{value:,}" if type(value) is int and value > 9999 else str(value)
            table.add_row(Text(f"  {name.replace('_', ' ')}"), Text(printable(shown)))
    console.print(table)


def print_findings(findings: Sequence[Finding], fit: Fit | None) -> None:
    """One row a trap, the fix under it; and what acceptance says."""
    console = new_console()
    table = Table("check", "status", "what was found")
    for each in findings:
        detail = f"{each.detail}\n{each.fix}" if each.fix and each.status != "ok" else each.detail
        table.add_row(each.name, Text(each.status, style=_STATUS.get(each.status, "")), Text(printable(detail)))
    console.print(table)
    if fit is not None:
        style = {"fits": "green", "weak": "yellow"}.get(fit.verdict, "bold red")
        text = f"acceptance by depth {format_alpha(fit.alpha) or '-'}, tau {fit.tau:.2f}: {fit.verdict}"
        console.print(Text(text, style=style), soft_wrap=True)
        low, high = fit.interval
        tried = f"tried on {fit.tried_on}: {fit.num_drafts} drafts, greedy"
        put_line(console, tried, "dim")
        put_line(
            console,
            f"first token accepted: {low:.0%} to {high:.0%} (95%); shuffled drafts: {fit.chance:.0%}; tau of prompt "
            f"lookup on the same prompts: {fit.lookup_tau:.2f}",
            "dim",
        )
