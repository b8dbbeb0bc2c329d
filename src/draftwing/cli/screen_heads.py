"""What the commands around heads show: a training run's progress, its end, and a doctor's findings."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from draftwing.cli.screen import FILE_WIDTH, format_alpha, printable

if TYPE_CHECKING:
    from draftwing.evaluate.fit import Fit
    from draftwing.heads.doctor.examine import Finding
    from draftwing.train.trainer import Progress as TrainProgress

__all__ = ["line", "print_findings", "training"]

_STATUS = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}
# A run in a file or pipe prints a line so often.
LINE_EVERY = 10


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=FILE_WIDTH)


def line(text: str, style: str = "") -> None:
    """One line on stderr: what is going on."""
    _console(stderr=True).print(Text(printable(text), style=style), soft_wrap=True)


class _Training:
    """Called with every iteration's progress."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar, self._evaluated = bar, ""
        self._task = bar.add_task("", total=None) if bar else None
        self._smooth: float | None = None

    def __call__(self, progress: TrainProgress) -> None:
        metrics = progress.metrics
        loss = float(metrics["loss"])
        self._smooth = loss if self._smooth is None else 0.95 * self._smooth + 0.05 * loss
        total = progress.iterations if progress.iterations < 10**9 else None
        judged = "tau" in metrics or "val_loss" in metrics
        if judged:
            self._evaluated = self._judgement(metrics)
        shown = f"loss {self._smooth:.3f}  {metrics['tokens_per_s']:.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, completed=progress.iteration, total=total, description=f"{shown}  {self._evaluated}"
            )
        elif judged or progress.iteration % LINE_EVERY == 0:
            agreement = format_alpha(metrics["agreement"]) if "agreement" in metrics else ""
            of = f"/{total}" if total else ""
            judgement = self._judgement(metrics)
            line(f"iteration {progress.iteration}{of}  {shown}  agreement {agreement}  {judgement}".rstrip())

    def _judgement(self, metrics: Mapping[str, Any]) -> str:
        parts = []
        if "val_loss" in metrics:
            parts.append(
                f"validation loss {metrics['val_loss']:.3f}, agreement {format_alpha(metrics['val_agreement'])}"
            )
        if "tau" in metrics:
            parts.append(f"tau {metrics['tau']:.2f} ({format_alpha(metrics['alpha'])})")
        return "  ".join(parts)


@contextmanager
def training() -> Iterator[_Training]:
    """A bar on a terminal, else a line every few iterations; yields what to call with a run's progress."""
    if not sys.stderr.isatty():
        yield _Training(None)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=_console(stderr=True)) as bar:
        yield _Training(bar)


def print_findings(findings: Sequence[Finding], fit: Fit | None) -> None:
    """One row a trap, the fix under it; and what acceptance says."""
    console = _console()
    table = Table("check", "status", "what was found")
    for each in findings:
        detail = f"{each.detail}\n{each.fix}" if each.fix and each.status != "ok" else each.detail
        table.add_row(each.name, Text(each.status, style=_STATUS.get(each.status, "")), Text(printable(detail)))
    console.print(table)
    if fit is not None:
        style = {"fits": "green", "weak": "yellow"}.get(fit.verdict, "bold red")
        text = f"acceptance by depth {format_alpha(fit.alpha)}, tau {fit.tau:.2f}: {fit.verdict}"
        console.print(Text(text, style=style), soft_wrap=True)
