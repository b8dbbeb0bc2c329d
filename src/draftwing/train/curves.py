"""A run's metrics as TensorBoard events while it goes on, and as one picture in the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftwing.train.trainer import METRICS, Progress


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics file; empty where there is none."""
    file = out / METRICS
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else []
    return [json.loads(line) for line in lines if line]


class TensorBoardLog:
    """Writes what a ``Trainer`` reports into ``out/tensorboard``."""

    def __init__(self, out: Path, start: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=start or None)

    def __call__(self, progress: Progress) -> None:
        """Log one iteration."""
        for name, value in progress.metrics.items():
            if name == "iteration":
                continue
            values = value if isinstance(value, list) else [value]
            for index, each in enumerate(values):
                tag = f"{name}/{index}" if isinstance(value, list) else name
                self._writer.add_scalar(tag, each, progress.iteration)

    def close(self) -> None:
        """Flush what is left."""
        self._writer.close()


def draw_curves(out: Path) -> Path:
    """``out/curves.png``: loss, agreement of each unrolled step, and tau on the validation prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    metrics = read_metrics(out)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    iterations = [each["iteration"] for each in metrics]
    left.plot(iterations, [each["loss"] for each in metrics], lw=0.6, alpha=0.6, label="training")
    judged = [each for each in metrics if "val_loss" in each]
    left.plot([e["iteration"] for e in judged], [e["val_loss"] for e in judged], "o-", label="validation")
    left.set(title="loss", xlabel="iteration")
    left.legend()
    watched = [each for each in metrics if "agreement" in each]
    for step in range(len(watched[0]["agreement"]) if watched else 0):
        middle.plot([e["iteration"] for e in watched], [e["agreement"][step] for e in watched], label=f"step {step}")
    middle.set(title="greedy agreement with the target (training)", xlabel="iteration", ylim=(0, 1))
    if watched:
        middle.legend()
    decoded = [each for each in metrics if "tau" in each]
    right.plot([e["iteration"] for e in decoded], [e["tau"] for e in decoded], "o-")
    right.set(title="tau, greedy, validation prompts (chain)", xlabel="iteration")
    file = out / "curves.png"
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file
