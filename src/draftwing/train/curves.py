"""A run's metrics as TensorBoard events during training, and as a picture at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftwing.train.trainer import Progress, read_metrics


class TensorBoardLog:
    """Writes the metrics of a ``Trainer`` into ``out/tensorboard``."""

    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out / "tensorboard"))

    def __call__(self, progress: Progress) -> None:
        for name, value in progress.metrics.items():
            tags = {f"{name}/{i}": x for i, x in enumerate(value)} if isinstance(value, list) else {name: value}
            for tag, number in tags.items():
                if tag != "iteration":
                    self._writer.add_scalar(tag, number, progress.iteration)

    def close(self) -> None:
        self._writer.close()


def draw_curves(out: Path) -> Path:
    """Write ``out/curves.png``: loss, agreement of each unrolled step, and tau on the validation prompts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    metrics = read_metrics(out)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")

    def points(name: str) -> tuple[list[int], list[Any]]:
        return [line["iteration"] for line in metrics if name in line], [line[name] for line in metrics if name in line]

    left.plot(*points("loss"), lw=0.6, alpha=0.6, label="training")
    left.plot(*points("val_loss"), "o-", label="validation")
    left.set(title="loss", xlabel="iteration")
    left.legend()
    iterations, agreement = points("agreement")
    for step, values in enumerate(zip(*agreement, strict=True)):
        middle.plot(iterations, values, label=f"step {step}")
    middle.set(title="greedy agreement with the target (training)", xlabel="iteration", ylim=(0, 1))
    if agreement:
        middle.legend()
    right.plot(*points("tau"), "o-")
    right.set(title="tau, greedy, validation prompts (chain)", xlabel="iteration")
    file = out / "curves.png"
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file
