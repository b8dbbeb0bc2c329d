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
_DEPTHS = 6  # of alpha; the page and the JSON have all


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
    console.print(_table(group.wholes, parts=False))
    if group.parts:
        put_line(console, "by category and turn")
        console.print(_table(group.parts, parts=True))
    put_line(
        console,
        "speedup: mean of the ratios to plain decoding, question by question, with a 95% interval over questions; "
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


def _table(rows: Sequence[Row], *, parts: bool) -> Table:
    table = Table("set")
    if parts:
        table.add_column("part")
    for name in ("sampling", "draft", "tree"):
        table.add_column(name)
    figures = ("questions", "tau", "speedup") if parts else ("questions", "tau", "speedup", "of means", "prompt")
    for name in (*figures, "tokens/s", "plain"):
        table.add_column(name, justify="right", no_wrap=True)
    if not parts:
        table.add_column("alpha by depth")
    table.add_column("identical")
    for row in rows:
        table.add_row(*_cells(row, parts=parts), style="bold" if row.set == "mean of sets" else "")
    return table


def _cells(row: Row, *, parts: bool) -> list[str | Text]:
    rule = "" if row.method["rule"] == "match" else f" ({row.method['rule']})"
    cells: list[str | Text] = [Text(printable(row.set))]
    if parts:
        turn = [] if row.turn is None else [f"turn {row.turn}"]
        cells.append(Text(printable(", ".join([*([row.category] if row.category else []), *turn]))))
    cells += [row.sampling, Text(printable(row.method["draft"]) + rule), row.method["budget"], str(row.num_questions)]
    cells += [_span(row.figures["tau"]), _span(row.figures["speedup"], "x")]
    if not parts:
        cells += [f"{row.figures[name].value:.2f}x" for name in ("speedup_ratio_of_means", "speedup_with_prompt")]
    cells += [f"{row.tokens_per_s:.1f}", f"{row.plain_tokens_per_s:.1f}"]
    if not parts:
        cells.append(format_alpha(row.alpha[:_DEPTHS]) + (" ..." if len(row.alpha) > _DEPTHS else "") or "-")
    return [*cells, _identical(row)]


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
