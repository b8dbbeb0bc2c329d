"""Compare the tau that `draftwing predict` forecasts with the tau of decoding.

    python benchmarks/forecast.py --num-prompts 32 --out build/forecast.json     # the shipped pair, both heads
    python benchmarks/forecast.py --target smollm2-135m-instruct --draft path/or/head --prompts held-out.jsonl

Forecasts come from the held-out statistics in each head's folder, which were collected on other prompts than these.
Every measured cell is written at once, and the same command resumes. The machine may be busy, since nothing is timed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import draftwing as dw
from draftwing.cli.measure import head_folder
from draftwing.cli.options import Drafting, SamplingOptions
from draftwing.lab.forecast import HeldOut, forecast
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.text.prompts import Prompt, read_prompts, shipped_prompts

TREES = ("chain:3", "chain:5", "static", "dynamic:24,6,4", "dynamic:59,8,10")


def main(
    target: Annotated[str | None, typer.Option(help="Folder, name or hub id; default the shipped one.")] = None,
    draft: Annotated[list[str] | None, typer.Option(help="Heads. [default: eagle3 and eagle1]")] = None,
    tree: Annotated[list[str] | None, typer.Option(help=f"[default: {', '.join(TREES)}]")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Default: the shipped ones.")] = None,
    num_prompts: Annotated[int, typer.Option(min=2)] = 32,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    out: Path = Path("build/forecast.json"),
) -> None:
    """Print a table and write JSON."""
    todo: Sequence[Prompt] = read_prompts(prompts, num_prompts) if prompts else shipped_prompts(num_prompts)
    plain = dw.load(target, "none")
    ready = [SamplingOptions().put(each, plain.tokenizer) for each in todo]
    settings = {"target": plain.target.name, "num_prompts": len(ready), "max_tokens": max_tokens}
    known = json.loads(out.read_text()) if out.exists() else {"settings": settings, "machine": describe_machine()}
    if known["settings"] != settings:
        raise typer.BadParameter(f"{out} has {known['settings']}, and this run {settings}: choose another --out")
    cells: list[dict[str, Any]] = known.setdefault("cells", [])
    for name in draft or ["eagle3", "eagle1"]:
        folder = head_folder(target, name)
        held_out = HeldOut.read(folder)
        maker = load_drafter(folder, plain.target, plain.tokenizer)
        budgets = {each: Drafting(tree=each).budget() for each in tree or TREES}
        for each in forecast(held_out, budgets, sorted(held_out.texts)):
            cell = next(
                (c for c in cells if (c["head"], c["tree"], c["T"]) == (name, each.tree, each.temperature)), None
            )
            if cell is None:
                lm = LM(plain.target, plain.tokenizer, maker, budget=budgets[each.tree])
                cell = {"head": name, "tree": each.tree, "T": each.temperature}
                cell |= measure(lm, ready, each.temperature, max_tokens)
                cells.append(cell)
            cell["forecast"] = asdict(each)
            cell["error"] = each.tau / cell["tau"] - 1
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(known, indent=2) + "\n")
            typer.echo(
                f"{name:8} T={each.temperature:g} {each.tree:16} forecast {each.tau:.2f} "
                f"[{each.tau_low:.2f}, {each.tau_high:.2f}]  measured {cell['tau']:.2f} "
                f"[{cell['low']:.2f}, {cell['high']:.2f}]  {cell['error']:+.1%}"
            )
    typer.echo(f"largest error {max(abs(cell['error']) for cell in cells):.1%} of {len(cells)}; wrote {out}")


def measure(lm: LM, prompts: Sequence[Prompt], temperature: float, max_tokens: int) -> dict[str, float]:
    """Measure tau, with its 95% bootstrap interval over the prompts. Each prompt has its own seed."""
    sampling = [dw.Sampling(temperature=temperature, max_tokens=max_tokens, seed=1000 + i) for i in range(len(prompts))]
    found = lm.generate(list(prompts), sampling, max_batch=16)
    counts = np.array([[each.stats.num_tokens, each.stats.num_forwards] for each in found])
    chosen = np.random.default_rng(0).integers(len(counts), size=(1000, len(counts)))
    sums = counts[chosen].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return {"tau": float(counts[:, 0].sum() / counts[:, 1].sum()), "low": float(low), "high": float(high)}


if __name__ == "__main__":
    typer.run(main)
