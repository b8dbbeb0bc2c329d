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
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from draftwing.errors import DraftwingWarning

if TYPE_CHECKING:
    from draftwing.dialogue import Said
    from draftwing.stats import Logprob

__all__ = [
    "Screen",
    "error",
    "format_alpha",
    "line",
    "new_console",
    "print_json",
    "printable",
    "put_line",
    "quiet",
    "silence",
    "text_of",
    "to_json",
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
