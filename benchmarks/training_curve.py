"""Measure tau over the length of training, and extrapolate to ten times as much.

    python benchmarks/training_curve.py --target smollm2-135m-instruct --cache build/chat-heads/features \
        --prompts held-out.jsonl --json benchmarks/results/NAME.json --png benchmarks/results/NAME.png

Every point is a separate run from scratch to the end of its schedule: within one run, learning rates would not have
decayed yet. A run reads as many tokens of the cache as its point, more than once if there are fewer. Runs are kept in
--runs, and the next command trains only missing ones. A finished head is a point too: --head eagle3=FOLDER, at the
tokens that its training read.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import draftwing as dw
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.text.prompts import Prompt, read_prompts, shipped_prompts
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from plain_decoding import commit

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COMMON: dict[str, Any] = {"tokens_per_batch": 2048, "eval_prompts": 0, "eval_every": 10**6}
METHODS: dict[str, dict[str, Any]] = {  # like recipes/chat_heads.py, whose heads are points of the same curves
    "eagle3": {"lr": 2e-3, "draft_vocab_size": 8192, "unroll_steps": 5, "later_share": 0.15},
    "eagle1": {"lr": 1e-3, "loss_vocab_size": 8192, "unroll_steps": 3, "later_share": 0.15},
    "hass": {"lr": 1e-3, "loss_vocab_size": 8192, "unroll_steps": 3, "later_share": 0.15},
}
TREES = {"chain of 5": dw.Budget(5), "60 nodes": dw.Budget(8, 10, 60)}


def train(method: str, tokens: float, target: str | None, cache: Path, runs: Path) -> Path:
    """Return the folder of a finished run."""
    updates = max(1, round(tokens / COMMON["tokens_per_batch"]))
    options = TrainOptions(method=method, iterations=updates, **COMMON, **METHODS[method])
    return run_to_end(runs / f"{method}-{tokens:g}", options, target, cache)


def run_to_end(out: Path, options: TrainOptions, target: str | None, cache: Path) -> Path:
    """Train a head on a cache unless it is finished; return its folder."""
    if not (out / "done").exists():
        done = prepare(RunFiles(target, [], cache=cache), options, out).run()
        (out / "done").write_text(str(done.iteration))
    return out / "head"


def tokens_of(head: Path) -> int:
    """Return the tokens that its training read."""
    training = json.loads((head / "config.json").read_text())["draftwing"]["training"]
    return int(training["iterations"] * training["tokens_per_batch"] * training["accumulation"])


def measure(plain: LM, head: Path, prompts: list[Prompt], max_tokens: int) -> dict[str, float]:
    """Measure tau at T=0 with each tree."""
    maker, found = load_drafter(head, plain.target, plain.tokenizer), {}
    for tree, budget in TREES.items():
        lm = LM(plain.target, plain.tokenizer, maker, budget=budget)
        done = lm.generate(prompts, max_tokens=max_tokens, max_batch=8)
        found[tree] = round(dw.Stats.sum(each.stats for each in done).tau, 3)
    return found


def forecast(points: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Extrapolate tau of each tree: the last three points as a line over log tokens; nothing from one point."""
    last, found = points[-3:], {}
    for tree in TREES if len(last) > 1 else ():
        taus = [each["tau"][tree] for each in last]
        slope = float(np.polyfit([np.log10(each["tokens"]) for each in last], taus, 1)[0])
        found[tree] = {"per_decade": round(slope, 3), "at_ten_times": round(taus[-1] + slope, 3)}
    return found


def draw(curves: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Plot tau over tokens."""
    figure, axes = plt.subplots(1, len(TREES), figsize=(10, 4), layout="constrained")
    for axis, tree in zip(axes, TREES, strict=True):
        for method, points in curves.items():
            axis.semilogx(
                [each["tokens"] for each in points], [each["tau"][tree] for each in points], "o-", label=method
            )
        axis.set(title=f"tau at T=0, {tree}", xlabel="tokens read in training")
        axis.legend()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main(
    cache: Annotated[Path, typer.Option(help="Features, see `draftwing data regenerate --features`.")],
    target: Annotated[str | None, typer.Option(help="Folder, name or hub id; default the shipped one.")] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"[default: {', '.join(METHODS)}]")] = None,
    tokens: Annotated[str, typer.Option(help="Of each run.")] = "1e5,3e5,1e6",
    head: Annotated[list[str] | None, typer.Option(help="METHOD=FOLDER: a finished head; repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Held-out prompts. [default: the shipped ones]")] = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    runs: Annotated[Path, typer.Option(help="Where heads are trained.")] = Path("build/training-curve"),
    output: Annotated[Path | None, typer.Option("--json")] = None,
    png: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    """Train missing heads, and print a table."""
    console, plain = Console(), dw.load(target, "none")
    todo = list(read_prompts(prompts, num_prompts) if prompts else shipped_prompts(num_prompts))
    finished: dict[str, list[Path]] = {}
    for each in head or []:
        name, _, folder = each.partition("=")
        finished.setdefault(name, []).append(Path(folder))
    curves: dict[str, list[dict[str, Any]]] = {}
    for name in method or METHODS:
        points = curves.setdefault(name, [])
        heads = [train(name, float(each), target, cache, runs) for each in tokens.split(",")] + finished.get(name, [])
        for place in heads:
            points.append({"tokens": tokens_of(place), "tau": measure(plain, place, todo, max_tokens)})
            console.print(f"{name}, {points[-1]['tokens']:,} tokens: {points[-1]['tau']}")
        points.sort(key=lambda point: point["tokens"])
    slopes = {name: forecast(points) for name, points in curves.items()}
    table = Table("head", "tokens read", *(f"tau, {tree}" for tree in TREES))
    for name, points in curves.items():
        for point in points:
            table.add_row(name, f"{point['tokens']:,}", *(f"{point['tau'][tree]:.2f}" for tree in TREES))
        if slopes[name]:
            at_ten_times = [f"{each['at_ten_times']:.2f}" for each in slopes[name].values()]
            table.add_row(f"{name}, by its slope", f"{10 * points[-1]['tokens']:,}", *at_ten_times, end_section=True)
    console.print(table)
    if png is not None:
        draw(curves, png)
    if output is not None:
        found = {name: {"points": points, "slope": slopes[name]} for name, points in curves.items()}
        settings = {"target": plain.target.name, "num_prompts": len(todo), "max_tokens": max_tokens, "temperature": 0}
        where = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        output.write_text(json.dumps({"curves": found, "settings": settings, **where}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
