"""Compare sampling with greedy decoding: tau of a head's trees at T=0 and T=1 by acceptance rule, and calibration.

    python benchmarks/sampling_trees.py --draft eagle3 --json benchmarks/results/NAME.json --png NAME.png

At T=1 the same head grows trees in three ways: under the target's own noise (``match``), by the draft's most probable
tokens (``match-top``, the way of EAGLE-2 and EAGLE-3), and by drawing them without replacement for multi-round
rejection on a static tree. The calibration curve compares the confidence of nodes with their acceptance.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import typer
from rich.console import Console
from rich.table import Table

import draftwing as dw
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.text.prompts import read_prompts, shipped_prompts
from draftwing.tree import PAD
from plain_decoding import commit

matplotlib.use("Agg")
import itertools

from matplotlib import pyplot as plt

# A static tree of 56 nodes for the classic rules, whose shape may not depend on what was drawn: wide first, then deep.
STATIC = (
    *((a,) for a in range(8)),
    *((a, b) for a in range(5) for b in range(4 - a // 2)),
    *((a, b, c) for a in range(3) for b in range(3 - a) for c in range(3 - b)),
    *((0, a, b, c) for a in range(2) for b in range(2) for c in range(2)),
    *((0, 0, a, b, c) for a in range(2) for b in range(2 - a) for c in range(2)),
    *((0, 0, 0, 0, 0, a) for a in range(2)),
    *((0, 0, 0, 0, 0, 0, a) for a in range(2)),
)


def pairs(step: dw.Step) -> list[tuple[float, bool]]:
    """Return, for every child of an accepted node, its confidence given that node, and True if it was accepted."""
    tree, found = step.tree, []
    if tree.confidence is None:
        return []
    for b, path in enumerate(step.accepted.path.tolist()):
        kept = {node for node in path if node != PAD}
        for node in range(1, tree.num_nodes):
            parent = int(tree.parents[b, node])
            if parent in kept and float(tree.confidence[b, parent]) > 0:
                chance = float(tree.confidence[b, node]) / float(tree.confidence[b, parent])
                found.append((min(chance, 1.0), node in kept))
    return found


def run(
    lm: LM, prompts: list[Any], tokens: int, temperature: float
) -> tuple[dw.Stats, list[tuple[float, bool]], float]:
    """Return statistics, calibration pairs, and the mean surprisal of the text under the target, in nats per token."""
    stats, seen, nats = dw.Stats(), [], 0.0
    for prompt in prompts:
        options = {"temperature": temperature, "max_tokens": tokens, "ignore_eos": True, "seed": 1, "logprobs": 0}
        for step in lm.stream(prompt, **options):
            stats.add(step.step)
            seen += pairs(step.step)
            nats -= sum(each.logprob for each in step.step.rows[0].logprobs or ())
    return stats, seen, nats / max(stats.num_tokens, 1)


def curve(seen: list[tuple[float, bool]], bins: int = 10) -> list[dict[str, float]]:
    """Return predicted and measured acceptance, in bins with equal numbers of nodes."""
    chances = torch.tensor([c for c, _ in seen])
    taken = torch.tensor([float(t) for _, t in seen])
    edges = torch.tensor([0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0001])
    found = []
    for low, high in itertools.pairwise(edges):
        inside = (chances >= low) & (chances < high)
        if int(inside.sum()) >= bins:
            found.append(
                {
                    "promised": round(float(chances[inside].mean()), 4),
                    "found": round(float(taken[inside].mean()), 4),
                    "nodes": int(inside.sum()),
                }
            )
    return found


def main(
    target: Annotated[str | None, typer.Option(help="Folder or hub id.")] = None,
    draft: Annotated[str, typer.Option(help="A head.")] = "eagle3",
    prompts: Annotated[Path | None, typer.Option(help="[default: the shipped ones]")] = None,
    num_prompts: int = 12,
    tokens: int = 96,
    depth: int = 8,
    width: int = 10,
    nodes: int = 60,
    output: Annotated[Path | None, typer.Option("--json")] = None,
    png: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    plain = dw.load(target, "none")
    maker = load_drafter(draft, plain.target, plain.tokenizer)
    todo = list(read_prompts(prompts, num_prompts) if prompts else shipped_prompts(num_prompts))
    dynamic, static = dw.Budget(depth, width, nodes), dw.Budget(paths=STATIC)
    ways = {
        "T=0, dynamic": (0.0, "match", dynamic),
        "T=1, dynamic, keyed noise": (1.0, "match", dynamic),
        "T=1, dynamic, top-k of q (EAGLE-2's way)": (1.0, "match-top", dynamic),
        "T=0, static": (0.0, "match", static),
        "T=1, static, keyed noise": (1.0, "match", static),
        "T=1, static, multi-round without replacement": (1.0, "multi-round", static),
        "T=0, chain": (0.0, "match", dw.Budget(5)),
        "T=1, chain, keyed noise": (1.0, "match", dw.Budget(5)),
        "T=1, chain, speculative sampling": (1.0, "speculative", dw.Budget(5)),
    }
    results, curves = {}, {}
    table = Table("way", "tau", "nats per token", "alpha by depth")
    for name, (temperature, rule, budget) in ways.items():
        lm = LM(plain.target, plain.tokenizer, maker, rule, budget)
        stats, seen, nats = run(lm, todo, tokens, temperature)
        results[name] = {
            "tau": round(stats.tau, 3),
            "alpha": [round(a, 3) for a in stats.alpha],
            "nats_per_token": round(nats, 3),
        }
        table.add_row(name, f"{stats.tau:.2f}", f"{nats:.2f}", " ".join(f"{a:.2f}" for a in stats.alpha))
        if "dynamic" in name:
            curves[name] = curve(seen)
    Console().print(table)
    calibration = Table("confidence given the parent", "accepted", "nodes", title="T=1, dynamic, keyed noise")
    for point in curves["T=1, dynamic, keyed noise"]:
        calibration.add_row(f"{point['promised']:.3f}", f"{point['found']:.3f}", str(point["nodes"]))
    Console().print(calibration)
    if png is not None:
        figure, axes = plt.subplots(figsize=(5, 4.5), layout="constrained")
        axes.plot([0, 1], [0, 1], "k:", lw=0.8)
        for name, points in curves.items():
            axes.plot([p["promised"] for p in points], [p["found"] for p in points], "o-", label=name)
        axes.set(xlabel="confidence of a node, given its parent", ylabel="share accepted")
        axes.legend(fontsize=7)
        figure.savefig(png, dpi=110)
    if output is not None:
        settings = {"draft": draft, "num_prompts": num_prompts, "tokens": tokens}
        where = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        result = {"results": results, "calibration": curves, "settings": settings, **where}
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
