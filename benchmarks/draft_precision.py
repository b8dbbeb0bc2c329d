"""Measure what 8-bit drafts gain in speed, and what they cost in tokens per forward.

    python benchmarks/draft_precision.py --out benchmarks/results/NAME.json

The shipped heads and draft model take turns in 8 bits (the default on processors that multiply bytes) and in the
precision of their files (bfloat16), over the shipped prompts, with a fixed chain and with the automatic budget. The
text is the target's in both cases.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import draftwing as dw
from draftwing.formats.read import read_head
from draftwing.lab.machine import describe_machine
from draftwing.loading import load_target
from draftwing.methods.base import Drafter
from draftwing.methods.causal_lm import CausalLMDrafter
from draftwing.methods.net_drafter import EagleDrafter
from draftwing.models.lean import LeanTarget
from draftwing.shipped import TOY
from draftwing.text.prompts import shipped_prompts
from draftwing.text.tokenizer import Tokenizer


def makers(target: dw.Target) -> dict[str, dict[str, Callable[[], Drafter]]]:
    """Drafters by name and precision."""
    found: dict[str, dict[str, Callable[[], Drafter]]] = {}
    for precision, is_fast in (("own", False), ("int8", True)):
        for name in ("eagle3", "eagle1"):
            net = read_head(TOY / name, target.embedding, target.head).prepack(fast=is_fast)
            found.setdefault(name, {})[precision] = partial(EagleDrafter, net, target, f"{name} {precision}")
        model = LeanTarget.from_folder(TOY / "draft", name=f"draft {precision}", fast=is_fast)
        found.setdefault("causal-lm", {})[precision] = partial(CausalLMDrafter, model, target.vocab_size)
    return found


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    num_prompts: Annotated[int, typer.Option(min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(min=8)] = 128,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Compare 8-bit drafts with drafts in the precision of their files."""
    target, tokenizer = load_target(TOY / "target"), Tokenizer(TOY / "target")
    prompts = shipped_prompts(num_prompts)
    models = {
        (name, str(budget or "auto"), precision): dw.LM(target, tokenizer, new_drafter, budget=budget)
        for name, both in makers(target).items()
        for budget in (dw.Budget(5), None)
        for precision, new_drafter in both.items()
    }
    rates: dict[tuple[str, ...], list[float]] = {}
    taus: dict[tuple[str, ...], float] = {}
    for turn in range(rounds + 1):
        for temperature in (0.0, 1.0):
            for key, lm in models.items():
                began, tokens, forwards = time.perf_counter(), 0, 0
                for prompt in prompts:
                    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "ignore_eos": True}
                    (done,) = lm.generate([prompt], max_tokens=max_tokens, **options)
                    tokens, forwards = tokens + len(done.token_ids), forwards + done.stats.num_forwards
                name = (*key, f"T={temperature:g}")
                taus[name] = tokens / forwards
                if turn:
                    rates.setdefault(name, []).append(tokens / (time.perf_counter() - began))
    rows: list[dict[str, Any]] = []
    table = Table("drafter", "budget", "sampling", "speed, int8 / own", "tau int8", "tau own")
    for drafter, budget, precision, sampling in rates:
        if precision == "int8":
            continue
        wide, narrow = (drafter, budget, "own", sampling), (drafter, budget, "int8", sampling)
        ratio = statistics.median(a / b for a, b in zip(rates[narrow], rates[wide], strict=True))
        row = {"drafter": drafter, "budget": budget, "sampling": sampling, "ratio": ratio}
        rows.append({**row, "tau_int8": taus[narrow], "tau_own": taus[wide]})
        table.add_row(drafter, budget, sampling, f"{ratio:.3f}", f"{taus[narrow]:.3f}", f"{taus[wide]:.3f}")
    Console().print(table)
    if out is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        result = {"date": time.strftime("%Y-%m-%d"), "commit": commit.stdout.strip(), "machine": describe_machine()}
        out.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
