"""How far a long run is: a bar on a terminal, a line every half minute in a file or pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from draftwing.cli import screen
from draftwing.cli.screen import format_alpha, new_console

if TYPE_CHECKING:
    from draftwing.train.trainer import Progress as TrainProgress


# Seconds between two lines of a run that writes to a file or pipe.
EVERY = 30.0


@contextmanager
def progress(
    title: str, detail: Callable[[], str] | None = None, *, resumes: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, or a line every half minute; yields what to call with (done, total).

    Args:
        detail: what else there is to say at the moment.
        resumes: the first call tells what was done before this run: the time left is reckoned without it.
    """
    console = new_console(stderr=True)
    if not console.is_terminal:
        counted = _Counted(title, detail, resumes=resumes)
        with _telling(counted.text):
            yield counted
        return
    columns: list[ProgressColumn] = [TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    if detail is not None:
        columns.append(_Detail(detail))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def token_rate(num_tokens: Callable[[], int]) -> Callable[[], str]:
    """A ``detail``: the tokens since now, and how many a second. ``num_tokens``: so far, whenever it is asked."""
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


@contextmanager
def training() -> Iterator[_Training]:
    """A bar on a terminal, else lines; yields what to call with a run's progress."""
    console = new_console(stderr=True)
    if not console.is_terminal:
        shown = _Training(None)
        with _telling(shown.text):
            yield shown
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        yield _Training(bar)


@contextmanager
def _telling(text: Callable[[], str]) -> Iterator[None]:
    """Print ``text()`` every half minute, from a thread of its own: a single step may take longer than that."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(EVERY):
            with suppress(OSError, ValueError):  # a stderr that is closed, or whose reader went away
                screen.line(text(), "dim")

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class _Counted:
    """Called with what is done and the total; tells it in words."""

    def __init__(self, title: str, detail: Callable[[], str] | None = None, *, resumes: bool = False) -> None:
        self._title, self._detail, self._done, self._total = title, detail, 0, 0
        self._kept = None if resumes else 0  # done before this run; None: the first call tells
        self._began = time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        self._kept = done if self._kept is None else self._kept
        self._done, self._total = done, total

    def text(self) -> str:
        """One line."""
        elapsed = time.perf_counter() - self._began
        if not self._total:
            return f"{self._title}, {_clock(elapsed)} so far"
        own = self._done - (self._kept or 0)
        left = f", about {_clock(elapsed * (self._total - self._done) / own)} left" if own else ""
        detail = f", {self._detail()}" if self._detail else ""
        return f"{self._title}: {self._done:,} of {self._total:,}{detail}, {_clock(elapsed)} so far{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Training:
    """Called with every iteration's progress. Evaluations become lines at once, the rest as ``training`` says."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar, self._evaluated = bar, ""
        self._task = bar.add_task("", total=None) if bar else None
        self._smooth: float | None = None
        self._agreement = ""
        self._text = "before the first iteration"

    def __call__(self, progress: TrainProgress) -> None:
        metrics = progress.metrics
        loss = float(metrics["loss"])
        self._smooth = loss if self._smooth is None else 0.95 * self._smooth + 0.05 * loss
        total = progress.iterations if progress.iterations < 10**9 else None
        judgement = _judgement(metrics)
        self._evaluated = judgement or self._evaluated
        if "agreement" in metrics:
            self._agreement = f"agreement {format_alpha(metrics['agreement'])}"
        shown = f"loss {self._smooth:.3f}  {metrics['tokens_per_s']:.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            shown = f"{shown}  {self._evaluated}"
            self._bar.update(self._task, completed=progress.iteration, total=total, description=shown)
            return
        of = f"/{total}" if total else ""
        self._text = f"iteration {progress.iteration}{of}  {shown}  {self._agreement}".rstrip()
        if judgement:
            screen.line(f"{self._text}  {judgement}")

    def text(self) -> str:
        """The latest iteration in one line."""
        return self._text


def _judgement(metrics: Mapping[str, Any]) -> str:
    parts = []
    if "val_loss" in metrics:
        parts.append(f"validation loss {metrics['val_loss']:.3f}, agreement {format_alpha(metrics['val_agreement'])}")
    if "tau" in metrics:
        parts.append(f"tau {metrics['tau']:.2f} ({format_alpha(metrics['alpha'])})")
    return "  ".join(parts)
