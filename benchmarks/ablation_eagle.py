"""Repeat the EAGLE papers' ablations on one target: draft inputs, methods, trees, amount of data.

    python benchmarks/ablation_eagle.py --data build/heads/answers.jsonl --minutes 2 --runs build/ablation \
        --json benchmarks/results/NAME.json --png benchmarks/results/NAME.png

Every head is trained from scratch for the same wall time on the same data (the data ablation: time in proportion to
the data) and measured at T=0 on held-out prompts. Trained heads are kept in --runs, and the next run trains only
missing ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

import draftwing as dw
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.methods.base import EAGLE_TREE, Drafter
from draftwing.text.prompts import read_prompts, shipped_prompts
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare
from plain_decoding import commit

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COMMON: dict[str, Any] = {"optimizer": "muon", "tokens_per_batch": 2048, "eval_prompts": 0, "eval_every": 10**6}
THIRD = {"unroll_steps": 5, "later_share": 0.34, "draft_vocab_size": 4096}
# name -> (options, share of the time)
HEADS: dict[str, tuple[dict[str, Any], float]] = {
    "inputs: token": ({"method": "eagle1", "inputs": "token"}, 1),
    "inputs: feature": ({"method": "eagle1", "inputs": "feature"}, 1),
    "inputs: feature, unshifted token": ({"method": "eagle1", "inputs": "feature-unshifted"}, 1),
    "EAGLE-1 (feature, shifted token)": ({"method": "eagle1"}, 1),
    "HASS": ({"method": "hass", "later_share": 0.34}, 1),
    "EAGLE-3": ({"method": "eagle3", **THIRD}, 1),
    "EAGLE-3.1": ({"method": "eagle3", "fc_norm": True, "norm_output": True, **THIRD}, 1),
    "EAGLE-3, 0.25x data": ({"method": "eagle3", "validation_share": 0.875, **THIRD}, 0.25),
    "EAGLE-3, 0.5x data": ({"method": "eagle3", "validation_share": 0.75, **THIRD}, 0.5),
    "EAGLE-3, 2x data": ({"method": "eagle3", "validation_share": 0.001, **THIRD}, 2),
}
HELD_OUT_SHARE = 0.5  # half of the data is 1x, so that there is a 2x
TREES = {
    "chain": dw.Budget(5),
    "static": dw.Budget(paths=EAGLE_TREE),
    "dynamic": dw.Budget(8, 10, 60),
}


def train(name: str, sources: Sequence[str], target: str | None, minutes: float, runs: Path) -> Path:
    options, share = HEADS[name]
    out = runs / "".join(c if c.isalnum() else "-" for c in name.lower())
    if not (out / "done").exists():
        settings = {"validation_share": HELD_OUT_SHARE, **COMMON, **options, "minutes": minutes * share}
        done = prepare(RunFiles(target, sources), TrainOptions(**settings), out).run()
        (out / "done").write_text(str(done.iteration))
    return out


def measure(plain: LM, maker: Callable[[], Drafter], prompts: Sequence[Any], tokens: int) -> dict[str, dict[str, Any]]:
    found = {}
    for tree, budget in TREES.items():
        lm = LM(plain.target, plain.tokenizer, maker, budget=budget)
        stats = dw.Stats.sum(g.stats for g in lm.generate(prompts, max_tokens=tokens, ignore_eos=True, max_batch=12))
        found[tree] = {"tau": round(stats.tau, 3), "alpha": [round(a, 3) for a in stats.alpha]}
    return found


def draw(results: dict[str, Any], file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    names = list(results)
    for offset, tree in enumerate(TREES):
        places = [i + 0.27 * (offset - 1) for i in range(len(names))]
        left.barh(places, [results[name]["trees"][tree]["tau"] for name in names], height=0.25, label=tree)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set(title="tau at T=0, held-out prompts")
    left.legend()
    for name in ("EAGLE-1 (feature, shifted token)", "HASS", "EAGLE-3", "EAGLE-3.1"):
        if name in results:
            right.plot(results[name]["trees"]["chain"]["alpha"], "o-", label=name)
    right.set(title="n-alpha: acceptance after n predicted features", xlabel="n", ylim=(0, 1))
    right.legend()
    figure.savefig(file, dpi=110)


def main(
    data: Annotated[list[str], typer.Option("--data", help="See `draftwing train --help`; repeatable.")],
    minutes: Annotated[float, typer.Option(help="Training time of each head.")] = 10,
    target: Annotated[str | None, typer.Option(help="Folder or hub id.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Held-out prompts. [default: the shipped ones]")] = None,
    num_prompts: int = 12,
    tokens: int = 96,
    runs: Annotated[Path, typer.Option(help="Where heads are trained.")] = Path("build/ablation"),
    part: Annotated[
        int | None, typer.Option(help="Only train, and only every second head (0 or 1), for two processes at once.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json")] = None,
    png: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    console = Console()
    if part is not None:
        for name in list(HEADS)[part::2]:
            train(name, data, target, minutes, runs)
        return
    plain = dw.load(target, "none")
    todo = read_prompts(prompts, num_prompts) if prompts else shipped_prompts(num_prompts)
    results: dict[str, Any] = {}
    for name in HEADS:
        console.print(f"{name} ...")
        out = train(name, data, target, minutes, runs)
        found = measure(plain, load_drafter(out / "head", plain.target, plain.tokenizer), todo, tokens)
        results[name] = {"iterations": int((out / "done").read_text()), "trees": found}
        console.print({tree: each["tau"] for tree, each in found.items()})
    table = Table("head", "iterations", *(f"tau, {tree}" for tree in TREES), "n-alpha 0..4 (chain)")
    for name, each in results.items():
        taus = [f"{each['trees'][tree]['tau']:.2f}" for tree in TREES]
        alpha = " ".join(f"{a:.2f}" for a in each["trees"]["chain"]["alpha"])
        table.add_row(name, str(each["iterations"]), *taus, alpha)
    console.print(table)
    if png is not None:
        draw(results, png)
    if output is not None:
        settings = {"minutes": minutes, "num_prompts": num_prompts, "tokens": tokens, "temperature": 0}
        where = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        output.write_text(json.dumps({"results": results, "settings": settings, **where}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
