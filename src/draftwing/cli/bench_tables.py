"""The tables of ``draftwing bench``: sets, their categories and turns, and what stands under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from draftwing.cli.screen import format_alpha, new_console, printable, put_line

if TYPE_CHECKING:
    from rich.console import Console

    from draftwing.evaluate.bench.results import Group, Row
    from draftwing.evaluate.bench.statistics import Estimate

__all__ = ["print_groups"]

_NAMED = 5  # skipped turns and differing texts that are named; the page has all
_DEPTHS = 3  # of alpha; the page and the JSON have more


def print_groups(groups: Sequence[Group]) -> None:
    """A table for each group of equal settings."""
    console = new_console()
    if not groups:
        put_line(console, "nothing is measured yet", "yellow")
    if len(groups) > 1:
        put_line(console, "results of different settings or machines, which do not compare: a table each", "yellow")
    for group in groups:
        _print_group(console, group)


def _print_group(console: Console, group: Group) -> None:
    put_line(console, f"\n{_title(group.settings)}", "bold")
    console.print(_table(group.wholes, _columns(console.width)))
    if group.parts:
        put_line(console, "by turn and category")
        console.print(_table(group.parts, _columns(min(console.width - 18, _WIDE - 1)), parts=True))
    put_line(
        console,
        "n: questions; speedup: mean of the ratios to plain decoding, question by question, with a 95% interval; "
        "of means: ratio of mean tokens/s; prompt: with the prompt's prefill in both times",
        "dim",
    )
    settings = {key: value for key, value in group.settings.items() if key not in ("machine", "target_identity")}
    put_line(console, f"settings: {_pairs(settings)}", "dim")
    put_line(console, f"machine: {_pairs(group.settings['machine'])}", "dim")
    for each in group.skipped[:_NAMED]:
        put_line(
            console,
            f"skipped: {_where(each)}: {each['prompt_tokens']:,} tokens leave no room for an answer in a context of "
            f"{each['context']:,}",
            "yellow",
        )
    _put_rest(console, len(group.skipped), "turns were skipped, for want of room")
    for each in group.differences[:_NAMED]:
        told = "the target's law is kept, not its text" if each["promise"] == "law" else "NOT plain decoding's text"
        style = "dim" if each["promise"] == "law" else "red"
        what = f"{each['draft']}, {each['budget']}, from token {each['differs_at'] + 1} on"
        put_line(console, f"differs: {_where(each)}: {what}: {told}", style)
    _put_rest(console, len(group.differences), "texts differ; the page shows them")


def _put_rest(console: Console, count: int, what: str) -> None:
    if count > _NAMED:
        put_line(console, f"in all, {count:,} {what}", "yellow")


def _where(each: Mapping[str, Any]) -> str:
    return f"{each['set']}, question {each['id']}, turn {each['turn']}, {each['sampling']}"


def _title(settings: Mapping[str, Any]) -> str:
    weights = "" if settings["quantize"] == "none" else f", {settings['quantize']}"
    return f"{settings['target']}, {settings['dtype']}{weights}, {settings['tokens']} tokens, batch 1"


# Terminal columns that the whole table takes, and one without all that can be worked out of the rest.
_WIDE, _MIDDLE = 155, 110


def _columns(width: int) -> tuple[str, ...]:
    """The figures that there is room for."""
    if width >= _WIDE:
        return ("n", "tau", "speedup", "of means", "prompt", "tokens/s", "plain", "alpha by depth", "identical")
    if width >= _MIDDLE:
        return ("n", "tau", "speedup", "tokens/s", "plain", "identical")
    return ("n", "tau", "speedup", "identical")


def _table(rows: Sequence[Row], figures: Sequence[str], *, parts: bool = False) -> Table:
    table = Table("set", *(("part",) if parts else ()), "sampling", "draft", "tree")
    for name in figures:
        is_text = name in ("alpha by depth", "identical")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        cells = _cells(row)
        part = (Text(printable(row.part)),) if parts else ()
        rule = "" if row.method["rule"] == "match" else f" ({row.method['rule']})"
        named = (Text(printable(row.set)), *part, row.sampling, Text(printable(row.method["draft"]) + rule))
        style = "bold" if row.set == "mean of sets" else ""
        table.add_row(*named, row.method["budget"], *(cells[name] for name in figures), style=style)
    return table


def _cells(row: Row) -> dict[str, str | Text]:
    more = " ..." if len(row.alpha) > _DEPTHS else ""
    return {
        "n": str(row.num_questions),
        "tau": _span(row.figures["tau"]),
        "speedup": _span(row.figures["speedup"], "x"),
        "of means": f"{row.figures['speedup_ratio_of_means'].value:.2f}x",
        "prompt": f"{row.figures['speedup_with_prompt'].value:.2f}x",
        "tokens/s": f"{row.tokens_per_s:.1f}",
        "plain": f"{row.plain_tokens_per_s:.1f}",
        "alpha by depth": format_alpha(row.alpha[:_DEPTHS]) + more or "-",
        "identical": _identical(row),
    }


def _span(estimate: Estimate, unit: str = "") -> str:
    ends = "" if estimate.low is None or estimate.high is None else f" [{estimate.low:.2f}-{estimate.high:.2f}]"
    return f"{estimate.value:.2f}{unit}{ends}".replace("[", "\\[")


def _identical(row: Row) -> Text:
    text = f"{row.num_identical} of {row.num_answers}"
    if row.promise == "law":
        return Text(f"{text} (same law)", style="green")
    return Text(text if row.lossless else f"{text}, LOSSY rule", style="green" if row.keeps_promise else "red")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items() if value is not None)
