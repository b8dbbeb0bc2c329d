"""Terminal output: streamed text, lines, tables, JSON, warnings and errors.

Model text never passes through rich's markup, and control characters in it never reach a terminal.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.control import Control
from rich.markup import escape
from rich.segment import ControlType, Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from draftwing.errors import DraftwingWarning

if TYPE_CHECKING:
    from draftwing.dialogue import AnswerStep

STYLES = tuple(map(Style.parse, ("dim", "cyan", "green", "yellow", "bold magenta")))  # by accepted tokens per step
FILE_WIDTH = 160  # columns of files and pipes, which have no width
# Control characters are shown as pictures: a terminal must not obey an escape sequence that a model writes.
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),  # bytes of an argument that are not UTF-8
}


def printable(text: str) -> str:
    """Return ``text`` with control characters, except newlines and tabs, made visible."""
    return text.translate(_PICTURES)


def new_console(*, stderr: bool = False) -> Console:
    """Return a console on the present ``sys.stdout`` or ``sys.stderr``.

    FORCE_COLOR, which Jupyter sets, must not draw bars over each other in a pipe: it colours stdout only.
    """
    if stderr and (sys.stderr is None or not sys.stderr.isatty()):
        return Console(stderr=True, highlight=False, force_terminal=False, width=FILE_WIDTH)
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=FILE_WIDTH)


def print_table(records: Sequence[Mapping[str, Any]], layout: str, console: Console | None = None) -> None:
    """Print a table of records, such as those of ``--json``.

    Args:
        layout: titles and formats of the columns, such as ``name: {name} | >tau: {tau:.2f}``. ``>`` aligns right.
            A value that is None or missing leaves its cell empty, and a column without values is left out.
    """
    columns = [column.split(": ", 1) for column in layout.split(" | ")]
    cells = [[_cell(record, form) for _, form in columns] for record in records]
    used = [any(row[index] for row in cells) for index in range(len(columns))]
    table = Table()
    for title, _ in itertools.compress(columns, used):
        is_right = title.startswith(">")
        table.add_column(title.removeprefix(">"), justify="right" if is_right else "left", no_wrap=is_right)
    for row in cells:
        table.add_row(*itertools.compress(row, used))
    (console or new_console()).print(table)


def layout_for_width(layouts: Mapping[int, str], width: int | None = None) -> str:
    """Return the layout of the largest key, a number of columns, that fits the terminal; the last one fits any."""
    room = new_console().width if width is None else width
    return next(layout for columns, layout in layouts.items() if room >= columns or columns == 0)


def _cell(record: Mapping[str, Any], form: str) -> Text:
    value = record.get(form.strip("{}"))
    if isinstance(value, Text):
        return value
    try:
        return Text(printable(form.format_map(record)))
    except (KeyError, TypeError):
        return Text()


def put_line(console: Console, text: str | Text, style: str = "") -> None:
    """Print one line, neither wrapped nor read as markup."""
    console.print(Text(printable(text), style=style) if isinstance(text, str) else text, soft_wrap=True)


def print_line(text: str | Text, style: str = "dim") -> None:
    """Print one line of results on stdout."""
    put_line(new_console(), text, style)


def line(text: str, style: str = "") -> None:
    """Print one line of progress or advice on stderr."""
    put_line(new_console(stderr=True), text, style)


def error(message: str) -> None:
    """Print one red line on stderr."""
    line(f"error: {' '.join(message.split())}", "red")


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print Draftwing's warnings as one line each."""

    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
            if issubclass(category, DraftwingWarning):
                line(f"warning: {' '.join(str(message).split())}", "yellow")
            else:
                show_others(message, category, *rest, **options)

        warnings.showwarning = show
        yield


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Report after Ctrl-C that ``out`` is incomplete."""
    try:
        yield
    except KeyboardInterrupt:
        line(f"stopped before {out} was complete: run the same command again", "yellow")
        raise


def discard_stdout() -> None:
    """Redirect stdout to nothing: its reader is gone, and flushing buffered text would fail."""
    with suppress(OSError, ValueError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def to_json(value: Mapping[str, Any]) -> str:
    """Return strict JSON; infinities and NaN become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False, default=str)


def print_json(value: Mapping[str, Any]) -> None:
    print(to_json(value), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_alpha(alpha: Sequence[float]) -> str:
    """Return acceptance by depth as two digits each, such as ``.80 .65``; ``-`` if there is none."""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in alpha) or "-"


def format_figures(record: Mapping[str, Any], max_depths: int = 99) -> list[str]:
    """Return tokens, speed, tau and acceptance of an answer, from its ``--json`` record."""
    alpha = record["alpha"]
    parts = [f"{record['num_tokens']} tokens", f"{record['tokens_per_s']:.1f} tokens/s", f"tau {record['tau']:.2f}"]
    if alpha:
        by_depth = format_alpha(alpha[:max_depths]) + (" ..." if len(alpha) > max_depths else "")
        parts.append(f"acceptance {record['acceptance']:.0%} (by depth {by_depth})")
    if not record["lossless"]:
        parts.append("LOSSY: not the target's own text")
    return parts


def format_pairs(values: Mapping[str, Any]) -> str:
    """Return ``name value, ...``, without empty values."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items() if value not in (None, {}))


def print_sections(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Print named groups of names and values."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, values in sections.items():
        table.add_row(f"[bold]{escape(title)}[/bold]", "")
        for name, value in values.items():
            text = str(value)
            if value is None:
                text = "none"
            elif isinstance(value, bool):
                text = "yes" if value else "no"
            elif isinstance(value, float):
                text = f"{value:,.2f}".removesuffix(".00")
            elif isinstance(value, int) and value > 9999:
                text = f"{value:,}"
            table.add_row(Text(f"  {name.replace('_', ' ')}"), Text(printable(text)))
    new_console().print(table)


def _accepted_style(num_accepted: int) -> Style:
    return STYLES[min(num_accepted, len(STYLES) - 1)]


def text_of(steps: Iterable[AnswerStep]) -> Text:
    """Return a whole answer, coloured like ``Screen.pieces``."""
    text = Text(overflow="fold")
    for step in steps:
        for piece in step.pieces:
            style = _accepted_style(step.num_accepted) if piece.is_drafted else Style.null()
            text.append(printable(piece.text), style)
    text.rstrip()
    return text


class _WordWrap:
    """Breaks streamed text at words. A word that turns out not to fit is erased and written on the next line."""

    def __init__(self) -> None:
        self._column = 0
        self._word: list[Segment] = []  # the characters since the last blank on this line

    def segments(self, parts: Iterable[tuple[str, Style]], width: int) -> Iterator[Segment]:
        """Yield ``parts`` in lines that leave the last column free: after it, terminals disagree where they are."""
        for text, style in parts:
            for char in text:
                yield from self._put(Segment(char, style), width - 1)

    def _put(self, char: Segment, width: int) -> Iterator[Segment]:
        cells = char.cell_length
        if char.text == "\n":
            self._column, self._word = 0, []
        elif char.text.isspace():
            cells = 8 - self._column % 8 if char.text == "\t" else cells
            self._word = []
            if self._column + cells > width:
                self._column = 0
                yield Segment.line()
                return
        else:
            is_wide = cells > 1  # such scripts break between any two characters
            if is_wide:
                self._word = []
            if self._column + cells > width:
                moved = sum(each.cell_length for each in self._word)
                if moved == self._column:  # a word longer than the line
                    self._word, moved = [], 0
                if moved:
                    yield Control((ControlType.CURSOR_BACKWARD, moved), (ControlType.ERASE_IN_LINE, 0)).segment
                yield Segment.line()
                yield from self._word
                self._column = moved
            if not is_wide:
                self._word.append(char)
        self._column += cells if char.text != "\n" else 0
        yield char


class Screen:
    """Output of ``generate`` and ``chat``: text on stdout, the rest (``info``) on stderr if stdout is no terminal.

    Args:
        wraps: break lines of text at words, on a terminal.
    """

    def __init__(self, console: Console | None = None, *, wraps: bool = False) -> None:
        self._out = console or new_console()
        self.is_terminal = self._out.is_terminal
        self.info = self._out if self.is_terminal else new_console(stderr=True)
        self._at_line_start = True
        self._wrap = _WordWrap() if wraps else None

    def note(self, text: str, style: str = "dim") -> None:
        """Print a line about the text, on a terminal broken at words."""
        self.info.print(Text(printable(text), style=style), soft_wrap=not self.info.is_terminal)

    def prompt(self, text: str) -> None:
        """Print the prompt before its continuation, on a terminal only."""
        if self.is_terminal:
            self._print([(text, Style.parse("bold"))])

    def write(self, text: str, num_accepted: int) -> None:
        """Print the text of one step exactly, coloured on a terminal."""
        self.pieces([(text, True)] if text else [], num_accepted)

    def pieces(self, pieces: Iterable[tuple[str, bool]], num_accepted: int) -> None:
        """Print the text of one step in pieces, each with a flag: only drafted ones are coloured."""
        style = _accepted_style(num_accepted)
        parts = [(text, style if is_drafted else Style.null()) for text, is_drafted in pieces]
        if self.is_terminal and parts:
            self._print(parts)
        elif text := "".join(text for text, _ in parts):
            self._at_line_start = text.endswith("\n")
            sys.stdout.write(text)
            sys.stdout.flush()

    def _print(self, parts: Sequence[tuple[str, Style]]) -> None:
        self._at_line_start = parts[-1][0].endswith("\n")  # before writing: Ctrl-C may come in between
        # Segments, not a Text: rich would expand tabs and strip spaces.
        shown = [(printable(text), style) for text, style in parts]
        if self._wrap is None:
            segments: Iterable[Segment] = itertools.starmap(Segment, shown)
        else:
            segments = Segment.simplify(self._wrap.segments(shown, self._out.width))
        self._out.print(Segments(segments), crop=False, end="")
        self._out.file.flush()

    def end_line(self) -> None:
        """End the text's last line if it is open."""
        if not self._at_line_start:
            self._out.print()
        self._at_line_start = True
        self._wrap = self._wrap and _WordWrap()

    def legend(self, first: int = 0) -> None:
        """Explain the colours if there are any, from ``first`` accepted tokens on."""
        if not self.is_terminal or self._out.no_color or self._out.color_system is None:
            return
        names = [str(number) for number in range(len(STYLES))]
        names[-1] += "+"
        put_line(self._out, Text(" ").join([Text("accepted at once:"), *map(Text, names[first:], STYLES[first:])]))
