"""The tables that commands print: comparisons, verifications, predictions, descriptions and a doctor's findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftwing.cli.screen import format_alpha, new_console, printable, put_line

if TYPE_CHECKING:
    from draftwing.evaluate.compare import Comparison, MethodResult
    from draftwing.evaluate.fit import Fit
    from draftwing.evaluate.forecast.forecast import Forecast
    from draftwing.evaluate.lossless import Verification
    from draftwing.evaluate.predict import Predictions
    from draftwing.heads.doctor.examine import Finding

__all__ = [
    "LAW_ALONE",
    "print_comparison",
    "print_findings",
    "print_forecasts",
    "print_info",
    "print_models",
    "print_predictions",
    "print_verification",
]

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
