"""Compare two revisions of Draftwing on this machine, to find what became slower.

    git worktree add ../before v0.1.0
    python benchmarks/revisions.py ../before . --json benchmarks/results/today.json
    python benchmarks/revisions.py ../before . --target model.gguf --drafts none,eagle3 --prompts mt_bench.jsonl
    python benchmarks/revisions.py ../before . --quantize int8

Each revision and drafter runs in separate processes, in turn, since a machine's speed changes by the minute, and two
copies of a model would share a cache that fits one: the shipped pair with every drafter and the automatic budget,
greedy and at T=1, or another target. Figures are median tokens/s of each process, and the ratio of each pair of
consecutive processes; texts must be the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

DRAFTS = "none,eagle3,eagle1,causal-lm,lookup"
SEED = 3


@dataclass(frozen=True)
class Plan:
    """The settings of every process."""

    target: str  # empty: the shipped one
    load: dict[str, str]  # how it is loaded: dtype, quantize
    draft: str
    prompts: list[Any]
    max_tokens: int
    turns: int


def measure(plan: Plan) -> dict[str, tuple[float, str]]:
    """Return tokens/s and a hash of the texts, by drafter and temperature."""
    import draftwing as dw

    lm = dw.load(plan.target or None, draft=plan.draft, **plan.load)
    rates: dict[str, list[float]] = {}
    texts: dict[str, str] = {}
    for turn in range(plan.turns + 1):
        for temperature in (0.0, 1.0):
            began, tokens = time.perf_counter(), []
            for prompt in plan.prompts:
                options = {"temperature": temperature, "seed": SEED, "max_tokens": plan.max_tokens}
                tokens += lm.generate([prompt], ignore_eos=True, **options)[0].token_ids
            name = f"{plan.draft}, T={temperature:g}"
            texts[name] = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
            if turn:  # the first warms everything up
                rates.setdefault(name, []).append(len(tokens) / (time.perf_counter() - began))
    return {name: (statistics.median(found), texts[name]) for name, found in rates.items()}


def run(tree: Path, cache: Path, plan: Plan) -> dict[str, tuple[float, str]]:
    """Run ``measure`` in a process that imports Draftwing from ``tree``, with a separate cache of costs."""
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src"), "DRAFTWING_CACHE": str(cache)}
    command, sent = [sys.executable, __file__, "--worker"], json.dumps(asdict(plan))
    done = subprocess.run(command, input=sent, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise typer.BadParameter(f"{tree}: {done.stderr.strip()[-400:]}")
    found: dict[str, tuple[float, str]] = json.loads(done.stdout.strip().split("\n")[-1])
    return found


def main(
    before: Annotated[Path, typer.Argument(help="A checkout of the old revision.")],
    after: Annotated[Path, typer.Argument(help="A checkout of the new one.")] = Path(),
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each revision.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each process.")] = 5,
    num_prompts: Annotated[int, typer.Option(min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(min=8)] = 128,
    target: Annotated[str, typer.Option(help="A folder, a GGUF file or a name. [default: the shipped one]")] = "",
    quantize: Annotated[str, typer.Option(help="Quantise the target: int8.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the target.")] = "",
    drafts: Annotated[str, typer.Option(help="Drafters, by commas.")] = DRAFTS,
    prompts: Annotated[Path | None, typer.Option(help="A file of them, as `draftwing` takes it.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare two revisions."""
    # Here, since a worker imports another revision; prompts are read once, that both have the same.
    from draftwing.cli.progress import progress
    from draftwing.lab.machine import describe_machine
    from draftwing.text.prompts import read_prompts, shipped_prompts

    asked = read_prompts(prompts, num_prompts) if prompts else shipped_prompts(num_prompts)
    load = {name: value for name, value in (("quantize", quantize), ("dtype", dtype)) if value}
    plans = [Plan(target, load, draft, list(asked), max_tokens, turns) for draft in drafts.split(",")]
    found: dict[str, list[tuple[tuple[float, str], tuple[float, str]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder, "before"), Path(folder, "after")
        for cache in caches:
            cache.mkdir(mode=0o700)
        latest = ""
        with suppress(KeyboardInterrupt), progress("processes", lambda: latest) as show:  # print what there is
            for done, plan in enumerate(plans * rounds):
                show(2 * done, 2 * rounds * len(plans))
                one = run(before, caches[0], plan)
                show(2 * done + 1, 2 * rounds * len(plans))
                other = run(after, caches[1], plan)
                for name, own in one.items():
                    found.setdefault(name, []).append((own, other[name]))
                    latest = f"{name}: {own[0]:.0f}, {other[name][0]:.0f} tokens/s"
    rows = {
        name: {
            "before": statistics.median(rate for (rate, _), _ in pairs),
            "after": statistics.median(rate for _, (rate, _) in pairs),
            "ratio": statistics.median(later / rate for (rate, _), (later, _) in pairs),
            "same_text": all(text == later for (_, text), (_, later) in pairs),
        }
        for name, pairs in found.items()
    }
    table = Table("drafter", "before", "after", "ratio", "same text")
    for name, row in rows.items():
        same = "yes" if row["same_text"] else "no"
        table.add_row(name, f"{row['before']:.1f}", f"{row['after']:.1f}", f"{row['ratio']:.3f}", same)
    Console().print(table)
    if out is not None:
        settings = {"rounds": rounds, **asdict(plans[0]), "target": Path(target).name, "num_prompts": len(asked)}
        settings |= {"draft": drafts, "prompts": prompts.name if prompts else ""}
        commits = {name: _commit(tree) for name, tree in (("before", before), ("after", after))}
        result = {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "commits": commits}
        out.write_text(json.dumps({**result, "settings": settings, "tokens_per_s": rows}, indent=1) + "\n")


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(measure(Plan(**json.load(sys.stdin)))))
    else:
        typer.run(main)
