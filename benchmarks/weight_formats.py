"""Compare weights in a file's precision with float32 copies: equal texts, and the speedup.

    python benchmarks/weight_formats.py --json benchmarks/results/NAME.json
    python benchmarks/weight_formats.py --target model.gguf --draft lookup --rounds 5
    python benchmarks/weight_formats.py --texts --num-prompts 100 --tokens 256 --temperatures 0,1 --batch 32

Both copies are in memory and decode every prompt in turn, with and without drafts, round by round, timed from the
second step on, since prefill is arithmetic, which takes both equally long. Figures are medians over the rounds, ratios
are medians over the pairs. The limit is the bandwidth of a sum over as many freshly written bytes as one token reads
weights, measured in the same rounds. With ``--texts`` the file's precision decodes with drafts and the float32 copy
without, once, and the texts are compared.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import draftwing as dw
from draftwing.lab.machine import describe_machine, read_bandwidth
from draftwing.loading import load_drafter
from draftwing.models.lean import LeanTarget
from draftwing.models.resolve import resolve
from draftwing.shipped import TOY
from draftwing.text.prompts import Prompt, read_prompts, shipped_prompts
from draftwing.text.tokenizer import Tokenizer
from plain_decoding import commit


def load(folder: Path, draft: str, *, expand: bool, arithmetic: str | None) -> dict[str, dw.LM]:
    """The model with and without drafts."""
    target = LeanTarget.from_folder(folder, torch.float32, expand=expand, arithmetic=arithmetic)
    tokenizer = Tokenizer(folder)
    found = {"plain": dw.LM(target, tokenizer)}
    if draft != "none":
        found[Path(draft).name] = dw.LM(target, tokenizer, load_drafter(draft, target, tokenizer))
    return found


def prompts_of(path: Path | None, count: int) -> list[Prompt]:
    """Return ``count`` items, repeating them if there are fewer."""
    texts: Sequence[Prompt] = shipped_prompts() if path is None else read_prompts(path)
    return [texts[index % len(texts)] for index in range(count)]


def decode(lm: dw.LM, prompt: Prompt, sampling: dw.Sampling) -> tuple[list[int], tuple[int, int, float]]:
    """Return the text's ids, and tokens, steps and seconds after the first step, which includes the prefill."""
    engine = lm.engine()
    request = engine.submit(lm.encode(prompt), sampling)
    engine.step()
    before, steps, began = len(request.token_ids), 0, time.perf_counter()
    for _ in engine.steps():
        steps += 1
    return request.token_ids, (len(request.token_ids) - before, steps, time.perf_counter() - began)


@dataclass
class Figures:
    """Measurements by method and copy: a figure for each round, and the texts of each prompt."""

    rates: dict[str, list[float]] = field(default_factory=dict)  # tokens/s; "limit": what the memory allows
    forwards: dict[str, list[float]] = field(default_factory=dict)  # tokens a forward
    texts: dict[tuple[float, int], set[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def identical(self) -> int:
        """Count the prompts and temperatures with equal texts."""
        return sum(len(each) == 1 for each in self.texts.values())


def main(
    target: Annotated[str, typer.Option(help="A folder or GGUF file of a lean family.")] = str(TOY / "target"),
    draft: Annotated[str, typer.Option(help="A head, a draft model, lookup or none.")] = "eagle3",
    prompts: Annotated[Path | None, typer.Option(help="JSONL; by default the shipped prompts.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 4,
    tokens: Annotated[int, typer.Option(min=2)] = 96,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded at once for --texts.")] = 1,
    texts: Annotated[bool, typer.Option("--texts", help="Compare texts alone.")] = False,
    temperatures: Annotated[str, typer.Option(help="With commas between them.")] = "0",
    arithmetic: Annotated[str, typer.Option(help="Of GGUF blocks: float32, or int8 (other texts).")] = "float32",
    limit: Annotated[bool, typer.Option(help="Measure how fast memory is read.")] = True,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare weights in a file's precision with float32."""
    folder = resolve(target)
    ways: dict[str, str | None] = {"own": arithmetic, "float32": None}
    models = {name: load(folder, draft, expand=name == "float32", arithmetic=way) for name, way in ways.items()}
    asked = prompts_of(prompts, num_prompts)
    wanted = [float(each) for each in temperatures.split(",")]
    if texts:
        compare_texts(models, draft, asked, wanted, tokens, batch, output)
        return
    figures, warm_up = Figures(), 1 if rounds > 1 else 0
    own = models["own"]["plain"].target
    for turn in track(range(rounds + warm_up), "decoding", console=Console(stderr=True)):
        is_counted = turn >= warm_up
        run_round(models, asked, wanted, tokens, figures, is_counted=is_counted)
        if limit and is_counted:
            bandwidth = read_bandwidth(own.num_weight_bytes) * 1e9 / own.num_weight_bytes
            figures.rates.setdefault("limit", []).append(bandwidth)
    rows = rows_of(models["own"], wanted, figures)
    report(folder, models, rows, figures.identical, len(figures.texts))
    if output is not None:
        settings = {"target": Path(target).name, "draft": Path(draft).name, "num_prompts": num_prompts}
        settings |= {"tokens": tokens, "rounds": rounds, "batch": batch, "temperatures": wanted}
        write(output, {"settings": {**settings, "kernel_arch": kernel_arch()}, **results(models, rows, figures)})


def run_round(
    models: dict[str, dict[str, dw.LM]],
    asked: list[Prompt],
    temperatures: list[float],
    tokens: int,
    figures: Figures,
    *,
    is_counted: bool,
) -> None:
    """Decode every prompt with every copy, with and without drafts; in a warm-up only the texts count."""
    for temperature in temperatures:
        for way in models["own"]:
            for name, lms in models.items():
                count, steps, seconds = 0, 0, 0.0
                for index, prompt in enumerate(asked):
                    sampling = dw.Sampling(temperature=temperature, seed=7, max_tokens=tokens, ignore_eos=True)
                    ids, timed = decode(lms[way], prompt, sampling)
                    figures.texts.setdefault((temperature, index), set()).add(tuple(ids))
                    count, steps, seconds = count + timed[0], steps + timed[1], seconds + timed[2]
                if is_counted:
                    key = f"{way}, T={temperature:g}, {name}"
                    figures.rates.setdefault(key, []).append(count / seconds)
                    figures.forwards.setdefault(key, []).append(count / steps)


def rows_of(ways: Iterable[str], temperatures: list[float], figures: Figures) -> dict[str, dict[str, float]]:
    rows = {}
    for way in ways:
        for temperature in temperatures:
            key = f"{way}, T={temperature:g}"
            ours, theirs = figures.rates[f"{key}, own"], figures.rates[f"{key}, float32"]
            rows[key] = {
                "own": statistics.median(ours),
                "float32": statistics.median(theirs),
                "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
                "tau": statistics.median(figures.forwards[f"{key}, own"]),
            }
            if way == "plain" and "limit" in figures.rates:
                shares = [a / b for a, b in zip(ours, figures.rates["limit"], strict=True)]
                rows[key]["share_of_limit"] = statistics.median(shares)
    return rows


def results(models: dict[str, dict[str, dw.LM]], rows: dict[str, dict[str, float]], figures: Figures) -> dict[str, Any]:
    limit = figures.rates.get("limit")
    return {
        "matrices": {name: lms["plain"].target.runs_as for name, lms in models.items()},
        "mb_per_token": {name: lms["plain"].target.num_weight_bytes / 1e6 for name, lms in models.items()},
        "tokens_per_s": rows,
        "limit_tokens_per_s": statistics.median(limit) if limit else None,
        "identical": [figures.identical, len(figures.texts)],
    }


def kernel_arch() -> str:
    return os.environ.get("DRAFTWING_KERNEL_ARCH", "native")


def write(output: Path, result: dict[str, Any]) -> None:
    """Return the result as JSON values, with machine and date."""
    result |= {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat(), "commit": commit()}
    output.write_text(json.dumps(result, indent=1) + "\n")


def compare_texts(
    models: dict[str, dict[str, dw.LM]],
    draft: str,
    asked: list[Prompt],
    temperatures: list[float],
    tokens: int,
    batch: int,
    output: Path | None,
) -> None:
    """Compare drafting in the file's precision with the baseline in float32."""
    same = {}
    for temperature in temperatures:
        options = {"max_tokens": tokens, "temperature": temperature, "seed": 7, "ignore_eos": True, "max_batch": batch}
        ours = models["own"][Path(draft).name if draft != "none" else "plain"].generate(asked, **options)
        theirs = models["float32"]["plain"].generate(asked, **options)
        pairs = zip(ours, theirs, strict=True)
        same[f"T={temperature:g}"] = sum(one.token_ids == other.token_ids for one, other in pairs)
    own = models["own"]["plain"].target
    print(f"{own.name}: {own.runs_as}: same text {same} of {len(asked)} of {tokens} tokens each")
    if output is not None:
        result = {
            "target": Path(own.name).name,
            "draft": Path(draft).name,
            "matrices": own.runs_as,
            "kernel_arch": kernel_arch(),
            "num_prompts": len(asked),
            "tokens": tokens,
            "identical": same,
        }
        write(output, result)


def report(folder: Path, models: Any, rows: dict[str, dict[str, float]], identical: int, count: int) -> None:
    own = models["own"]["plain"].target
    table = Table("decoding", "own tokens/s", "float32", "ratio", "tau", "share of limit", title=f"{folder.name}")
    for key, row in rows.items():
        share = f"{row['share_of_limit']:.0%}" if "share_of_limit" in row else ""
        figures = (f"{row[name]:.1f}" for name in ("own", "float32"))
        table.add_row(key, *figures, f"{row['ratio']:.2f}x", f"{row['tau']:.2f}", share)
    Console().print(table)
    Console().print(
        f"own: {own.runs_as}, {own.num_weight_bytes / 1e6:.1f} MB a token. Same text: {identical} of {count}."
    )


if __name__ == "__main__":
    typer.run(main)
