"""Progress of long runs: a bar on a terminal, a line every half minute in a file or pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from draftwing.cli import screen
from draftwing.cli.screen import format_alpha, new_console

if TYPE_CHECKING:
    from draftwing.train.evaluate import Evaluation
    from draftwing.train.trainer import Progress as TrainProgress

EVERY = 30.0  # seconds between two lines in a file or pipe


@contextmanager
def progress(
    title: str, detail: Callable[[], str] = str, *, resumes: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr; yields a function to call with (done, total). ``detail`` returns further text.

    If ``resumes``, the first call reports earlier runs' work, which is left out of the estimate of the time left.
    """
    console = new_console(stderr=True)
    if not console.is_terminal:
        counter = _Counter(title, detail, resumes=resumes)
        with _print_regularly(counter.text):
            yield counter
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), _Detail(detail))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


class _Detail(ProgressColumn):
    """Text that changes between two calls, too."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text())


def token_rate(num_tokens: Callable[[], int]) -> Callable[[], str]:
    """Return a ``detail``: the number of tokens so far, and per second since this call."""
    began = time.perf_counter()

    def text() -> str:
        count = num_tokens()
        return f"{count:,} tokens, {count / max(time.perf_counter() - began, 1e-9):,.0f} tokens/s"

    return text


class _Counter:
    def __init__(self, title: str, detail: Callable[[], str], *, resumes: bool) -> None:
        self._title, self._detail, self._done, self._total = title, detail, 0, 0
        self._done_before = None if resumes else 0  # None until the first call
        self._began = time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        self._done_before = done if self._done_before is None else self._done_before
        self._done, self._total = done, total

    def text(self) -> str:
        elapsed = time.perf_counter() - self._began
        detail = f", {text}" if (text := self._detail()) else ""
        if not self._done and not self._total:
            return f"{self._title}{detail}, {_clock(elapsed)} so far"
        done_now = self._done - (self._done_before or 0)
        seconds = elapsed * (self._total - self._done) / done_now if self._total and done_now else None
        left = "" if seconds is None else f", about {_clock(seconds)} left"
        of = f" of {self._total:,}" if self._total else ""
        return f"{self._title}: {self._done:,}{of}{detail}, {_clock(elapsed)} so far{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def _print_regularly(text: Callable[[], str]) -> Iterator[None]:
    """Print ``text()`` every half minute from a thread: a single step may take longer than that."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(EVERY):
            with suppress(OSError, ValueError):  # a stderr that is closed, or whose reader is gone
                screen.line(text(), "dim")

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def training(evaluation: Evaluation | None = None) -> Iterator[Callable[[TrainProgress], None]]:
    """Show a training run; yields a function to call after every iteration. Evaluations are printed at once.

    What an ``evaluation`` does at present is shown too, as no iteration ends meanwhile.
    """
    mean_loss: float | None = None
    text = agreement = evaluating = ""

    def on_evaluation(what: str) -> None:
        nonlocal evaluating
        evaluating = what and f"evaluating: {what}; "

    if evaluation is not None:
        evaluation.on_progress = on_evaluation
    with progress("training", lambda: evaluating + (text or "the first update"), resumes=True) as show:

        def on_progress(step: TrainProgress) -> None:
            nonlocal mean_loss, text, agreement
            metrics = step.metrics
            loss = float(metrics["loss"])
            mean_loss = loss if mean_loss is None else 0.95 * mean_loss + 0.05 * loss
            if "agreement" in metrics:
                agreement = f", agreement {format_alpha(metrics['agreement'])}"
            text = f"loss {mean_loss:.3f}, {metrics['tokens_per_s']:.0f} tokens/s{agreement}"
            show(step.iteration, step.iterations if step.iterations < 10**9 else 0)
            evaluation = ""
            if "val_loss" in metrics:
                val_agreement = format_alpha(metrics["val_agreement"])
                evaluation = f", validation loss {metrics['val_loss']:.3f}, agreement {val_agreement}"
            if "tau" in metrics:
                evaluation += f", tau {metrics['tau']:.2f} ({format_alpha(metrics['alpha'])})"
            if evaluation:
                screen.line(f"iteration {step.iteration}: {text}{evaluation}")

        yield on_progress
