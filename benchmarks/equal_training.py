"""Compare kinds of heads after equal minutes or equal tokens of training on the same data.

    python benchmarks/equal_training.py --target smollm2-135m-instruct --quantize int8 --prompts held-out.jsonl \
        --cache build/chat-heads/features --minutes 6 --json benchmarks/results/NAME.json
    python benchmarks/equal_training.py --cache build/chat-heads/features --tokens 5e5 --method eagle1 --method eagle3

Every method is trained from scratch on the same cache of features, one after the other, on an idle machine. A cheap
method sees more text in equal minutes; equal tokens show what it learns from a text. Heads are kept in --runs: the next
run trains only missing ones and resumes an interrupted one. Then each head drafts with the same trees, which gives tau,
milliseconds of drafting, and bytes.
"""

from __future__ import annotations

import json
import math
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

import draftwing as dw
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM
from draftwing.loading import load_drafter
from draftwing.text.prompts import Prompt, read_prompts, shipped_prompts
from draftwing.train.feature_cache import FeatureCache
from draftwing.train.options import TrainOptions
from plain_decoding import commit
from training_curve import COMMON, TREES, run_to_end, tokens_of

UNROLLED: dict[str, Any] = {"later_share": 0.15}  # share that continues after the first step: see docs/dev/log.md
METHODS: dict[str, dict[str, Any]] = {
    "medusa": {"draft_vocab_size": 8192},
    "hydra": {"draft_vocab_size": 8192},
    "eagle1": {"loss_vocab_size": 8192, **UNROLLED},
    "hass": {"loss_vocab_size": 8192, **UNROLLED},
    "eagle3": {"lr": 2e-3, "draft_vocab_size": 8192, **UNROLLED},
    "mtp": {"loss_vocab_size": 8192, "unroll_steps": 1},
    "mtp-5": {"method": "mtp", "loss_vocab_size": 8192, "unroll_steps": 5},
    "kangaroo": {"loss_vocab_size": 8192},
    "dflash": {"loss_vocab_size": 8192, "num_layers": 2},
    "dspark": {"loss_vocab_size": 8192, "num_layers": 2},
}
READS_SEVERAL = ("dflash", "dspark")  # they read any states that the cache has
TEMPERATURES, SEED = (0.0, 1.0), 7


def train(name: str, length: tuple[float, float | None], target: str | None, cache: Path, runs: Path) -> Path:
    """Return the folder of a finished run. ``length``: minutes, or tokens if they are given."""
    said = {"method": name, **COMMON, **METHODS[name]}
    if said["method"] in READS_SEVERAL:
        *taps, _ = FeatureCache(cache).info.states  # the last one is the LM head's
        said["taps"] = tuple(taps)
    minutes, tokens = length
    if tokens is None:
        return run_to_end(runs / f"{name}-{minutes:g}", TrainOptions(minutes=minutes, **said), target, cache)
    said["iterations"] = max(1, round(tokens / COMMON["tokens_per_batch"]))
    return run_to_end(runs / f"{name}-{tokens:g}-tokens", TrainOptions(**said), target, cache)


def measure(plain: LM, texts: dict[float, list[str]], head: Path, prompts: list[Prompt], tokens: int) -> dict[str, Any]:
    """Measure tau, texts identical to the baseline's, and milliseconds of drafting a step, by tree and temperature."""
    maker, found = load_drafter(head, plain.target, plain.tokenizer), {}
    for tree, budget in TREES.items():
        lm = LM(plain.target, plain.tokenizer, maker, budget=budget)
        alone = lm.generate(prompts[:4], max_tokens=64, max_batch=1)
        draft_ms = [1000 * each.stats.seconds["draft"] / each.stats.num_forwards for each in alone]
        for temperature in TEMPERATURES:
            answers = lm.generate(prompts, max_tokens=tokens, temperature=temperature, seed=SEED)
            found[f"{tree}, T={temperature:g}"] = {
                "tau": round(dw.Stats.sum(each.stats for each in answers).tau, 3),
                "same": sum(each.text == text for each, text in zip(answers, texts[temperature], strict=True)),
                "draft_ms": round(statistics.median(draft_ms), 2),
            }
    return found


def describe(head: Path) -> dict[str, Any]:
    """Return what a head read in training, and its size on disk."""
    with safe_open(head / "model.safetensors", "pt") as file:
        numbers = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return {"tokens": tokens_of(head), "megabytes_bf16": round(2 * numbers / 1e6, 1)}


def main(
    cache: Annotated[Path, typer.Option(help="Features, see `draftwing data regenerate --features`.")],
    target: Annotated[str | None, typer.Option(help="Folder, name or hub id; default the shipped one.")] = None,
    quantize: Annotated[str, typer.Option(help="Of the target while heads are measured.")] = "none",
    method: Annotated[list[str] | None, typer.Option(help=f"[default: {', '.join(METHODS)}]")] = None,
    minutes: Annotated[float, typer.Option(help="Of each run.")] = 6,
    tokens: Annotated[float | None, typer.Option(help="Of each run, instead of minutes.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Held-out prompts. [default: the shipped ones]")] = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    runs: Annotated[Path, typer.Option(help="Where heads are trained.")] = Path("build/equal-training"),
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Train missing heads, and print a table."""
    console, plain = Console(), dw.load(target, "none", quantize=None if quantize == "none" else quantize)
    todo = list(read_prompts(prompts, num_prompts) if prompts else shipped_prompts(num_prompts))
    heads = {name: train(name, (minutes, tokens), target, cache, runs) for name in method or METHODS}
    texts = {
        temperature: [
            each.text for each in plain.generate(todo, max_tokens=max_tokens, temperature=temperature, seed=SEED)
        ]
        for temperature in TEMPERATURES
    }
    found: dict[str, Any] = {}
    columns = [f"{tree}, T={temperature:g}" for tree in TREES for temperature in TEMPERATURES]
    table = Table("head", "tokens read", "MB", *(f"tau, {each}" for each in columns), "draft ms", "same texts")
    for name, head in heads.items():
        cells = measure(plain, texts, head, todo, max_tokens)
        found[name] = about = {**describe(head), "cells": cells}
        taus = [f"{cells[each]['tau']:.2f}" for each in columns]
        times = "/".join(f"{cells[f'{tree}, T=0']['draft_ms']:.1f}" for tree in TREES)
        same = f"{sum(each['same'] for each in cells.values())}/{len(columns) * len(todo)}"
        table.add_row(name, f"{about['tokens']:,}", f"{about['megabytes_bf16']:.0f}", *taus, times, same)
        console.print(f"{name}: {taus}, {same} texts the same")
    console.print(table)
    if output is not None:
        settings = {
            "target": plain.target.name, "quantize": quantize, "minutes": None if tokens else minutes, "tokens": tokens,
            "num_prompts": len(todo),
            "max_tokens": max_tokens, "methods": METHODS,
        }  # fmt: skip
        where = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        output.write_text(json.dumps({"heads": found, "settings": settings, **where}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
