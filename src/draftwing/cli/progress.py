"""Progress of long runs: a bar on a terminal, a line every half minute in a file or pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftwing.cli import screen
from draftwing.cli.screen import format_alpha, new_console

if TYPE_CHECKING:
    from draftwing.train.trainer import Progress as TrainProgress

EVERY = 30.0  # seconds between two lines in a file or pipe


@contextmanager
def progress(
    title: str, detail: Callable[[], str] = str, *, resumes: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr; yields a function to call with (done, total).

    Args:
        detail: returns further text.
        resumes: the first call reports earlier runs' work, which is left out of the estimate of the time left.
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
        yield lambda done, total: bar.update(task, completed=done, total=total)


def token_rate(num_tokens: Callable[[], int]) -> Callable[[], str]:
    """Return a ``detail``: the number of tokens so far, and per second since this call."""
    began = time.perf_counter()

    def text() -> str:
        count = num_tokens()
        return f"{count:,} tokens, {count / max(time.perf_counter() - began, 1e-9):,.0f} tokens/s"

    return text


class _Detail(ProgressColumn):
    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text())


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
        if not self._total:
            return f"{self._title}, {_clock(elapsed)} so far"
        done_now = self._done - (self._done_before or 0)
        left = f", about {_clock(elapsed * (self._total - self._done) / done_now)} left" if done_now else ""
        detail = f", {text}" if (text := self._detail()) else ""
        return f"{self._title}: {self._done:,} of {self._total:,}{detail}, {_clock(elapsed)} so far{left}"


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
def training() -> Iterator[Callable[[TrainProgress], None]]:
    """Show a training run; yields a function to call after every iteration. Evaluations are printed at once."""
    console = new_console(stderr=True)
    if not console.is_terminal:
        lines = _Training(None)
        with _print_regularly(lambda: lines.text):
            yield lines
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        yield _Training(bar)


class _Training:
    def __init__(self, bar: Progress | None) -> None:
        self._bar, self._evaluated = bar, ""
        self._task = bar.add_task("", total=None) if bar else None
        self._mean_loss: float | None = None
        self._agreement = ""
        self.text = "before the first iteration"

    def __call__(self, progress: TrainProgress) -> None:
        metrics = progress.metrics
        loss = float(metrics["loss"])
        self._mean_loss = loss if self._mean_loss is None else 0.95 * self._mean_loss + 0.05 * loss
        total = progress.iterations if progress.iterations < 10**9 else None
        evaluations = []
        if "val_loss" in metrics:
            agreement = format_alpha(metrics["val_agreement"])
            evaluations.append(f"validation loss {metrics['val_loss']:.3f}, agreement {agreement}")
        if "tau" in metrics:
            evaluations.append(f"tau {metrics['tau']:.2f} ({format_alpha(metrics['alpha'])})")
        evaluated = "  ".join(evaluations)
        self._evaluated = evaluated or self._evaluated
        if "agreement" in metrics:
            self._agreement = f"agreement {format_alpha(metrics['agreement'])}"
        text = f"loss {self._mean_loss:.3f}  {metrics['tokens_per_s']:.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            description = f"{text}  {self._evaluated}"
            self._bar.update(self._task, completed=progress.iteration, total=total, description=description)
            return
        of = f"/{total}" if total else ""
        self.text = f"iteration {progress.iteration}{of}  {text}  {self._agreement}".rstrip()
        if evaluated:
            screen.line(f"{self.text}  {evaluated}")
