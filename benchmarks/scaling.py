"""Measure how a step's time grows with context, rows and nodes, and a row's memory with its context.

    python benchmarks/scaling.py --json OUT.json --png OUT.png
    python benchmarks/scaling.py --target FOLDER --quantize int8 --contexts 128,256,512 --rows 1,2,4 --json OUT.json

One of the three doubles while the other two stay. A step is one forward of the target over a chain or a bushy tree
(four children each) with N nodes in every row, without what follows it; a draft level is the time of one more level of
N nodes in every row of an EAGLE-3 head: the difference between drafting one level and several. All points of a panel
are measured in turn, round after round, and medians are shown.

The head has random weights and the target's shape. If the target's context is too short, it is replaced by a model of
the same shape with random weights and a longer context, in a temporary folder, since only the cost matters. Contexts
are prompts of random ids; drafting adds some tokens to each while it is measured.

Time that grows in a line with a constant (t = a + b x) adds twice as much with each doubling: its increments have the
exponent 1. A term is worse than linear if the last increments grow faster than that by more than the noise.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import draftwing as dw
from draftwing.formats.write import write_head
from draftwing.lab.machine import describe_machine
from draftwing.loading import load_drafter, load_target
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.models.lean import LeanContext, LeanTarget
from draftwing.shipped import TOY
from draftwing.tree import DraftTree
from plain_decoding import commit
from sweep import numbers, short

matplotlib.use("Agg")
from matplotlib import pyplot as plt

NOISE = 0.15  # spread of a ratio of increments
SEEN = 0.1  # an increment below this share of the time before it says nothing
BRANCHES = 4  # children of each node of a bushy tree
LEVELS = 3  # more levels, to measure the time of one
MARGIN = 1024  # tokens of room beyond the longest context: trees, and what drafting writes
TERMS = ("chain", "bushy tree", "draft level")

Point = tuple[int, int, int]  # context, rows, nodes
Result = dict[str, Any]
Weights = dict[str, Any]  # dtype and quantize, as of `load_target`


# --- the fit ---------------------------------------------------------------------------------------------------------


def exponents(x: Sequence[float], y: Sequence[float]) -> list[float | None]:
    """Return the growth exponent between consecutive points: 1 if y grows like x; None if y is not positive."""
    found: list[float | None] = []
    for low, high, less, more in zip(x, x[1:], y, y[1:], strict=False):
        found.append(math.log(more / less) / math.log(high / low) if less > 0 and more > 0 else None)
    return found


def increments_exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return how fast the increments of y grow at the end: 1 for a line, 2 for a square, None if they are too small.

    The last pair of increments, or the last two pairs together, whichever grows less: one slow point proves nothing.
    """
    steps = [(low, more - less) for low, less, more in zip(x, y, y[1:], strict=False) if more - less > SEEN * less]
    if len(steps) < 2 or y[-1] - y[-2] <= SEEN * y[-2]:
        return None
    places, sizes = [place for place, _ in steps], [size for _, size in steps]

    def slope(first: int) -> float:
        return math.log(sizes[-1] / sizes[first]) / math.log(places[-1] / places[first])

    return slope(-2) if len(steps) == 2 else min(slope(-2), slope(-3))


def fit(x: Sequence[float], y: Sequence[float]) -> Result:
    """Describe the growth of one term; ``x`` doubles."""
    growth, tail = exponents(x, y), increments_exponent(x, y)
    last = tail if tail is not None else growth[-1] if growth else None
    return {
        "exponents": [None if each is None else round(each, 3) for each in growth],
        "increments_exponent": None if tail is None else round(tail, 3),
        "worse_than_linear": last is not None and last > 1 + math.log2(1 + NOISE),
    }


def verdict(fitted: Result) -> str:
    tail = fitted["increments_exponent"]
    shown = "" if tail is None else f" ({tail:.2f})"
    if fitted["worse_than_linear"]:
        return f"[red]WORSE than linear{shown}[/red]"
    return f"linear or less{shown}"


# --- measurement -----------------------------------------------------------------------------------------------------


def lengthened(folder: Path, out: Path, max_length: int) -> Path:
    """A model of the same shape with random weights and a longer context, as the folder ``out``."""
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.max_position_embeddings = max_length
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)
    return out


def random_head(target: LeanTarget, out: Path) -> Path:
    """An EAGLE-3 head of the target's shape, with half its vocabulary, as the folder ``out``."""
    layers = target.num_layers
    taps = tuple(min(max(tap, 0), layers) for tap in (2, layers // 2, layers - 3))
    config = EagleConfig.for_target(3, target.config, max(1, target.vocab_size // 2), taps=taps)
    torch.manual_seed(1)
    write_head(out, EagleNet(config, target.embedding, None, torch.arange(config.draft_vocab_size) * 2))
    return out


def tree_of(pending: torch.Tensor, nodes: int, *, bushy: bool) -> DraftTree:
    """(B,) -> a tree of ``count`` nodes in every row."""
    tokens = pending[:, None].repeat(1, nodes)
    if not bushy:
        return DraftTree.chain(tokens)
    parents = torch.arange(nodes, device=tokens.device).sub(1).div(BRANCHES, rounding_mode="floor")
    return DraftTree(tokens, parents.expand_as(tokens).clone())


class Bench:
    """Rows of one context, whose steps are timed.

    Args:
        target: with room for the context and ``MARGIN`` more.
        drafter: with empty state.
        prompt: of ``context`` + 1 ids, the last of which is pending.
    """

    def __init__(self, target: LeanTarget, drafter: dw.Drafter, rows: int, prompt: Sequence[int]) -> None:
        self._target, self._decoder = target, dw.Decoder(target, drafter)
        for _ in range(rows):
            self._decoder.admit(prompt, dw.Sampling(max_tokens=target.max_length, ignore_eos=True))
        assert isinstance(self._decoder.ctx, LeanContext)
        self.ctx = self._decoder.ctx

    def seconds(self, term: str, nodes: int) -> float:
        """Return the seconds of one step, or of one more level of a draft."""
        if term == "draft level":
            return (self._draft(1 + LEVELS, nodes) - self._draft(1, nodes)) / LEVELS
        tree = tree_of(self.ctx.pending(), nodes, bushy=term == "bushy tree")
        began = time.perf_counter()
        self._target.forward(self.ctx, tree)
        if self._target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _draft(self, depth: int, width: int) -> float:
        """Verify one of the scored nodes, since only drafting is timed."""
        self._decoder.budget = dw.Budget(depth, width, None if width == 1 else 1)
        return self._decoder.step().timings.draft


def measure(
    points: Sequence[Point], benches: dict[tuple[int, int], Bench], rounds: int, label: str
) -> dict[str, list[list[float]]]:
    """Seconds by term, point and round; the first round warms up and is not among them."""
    found: dict[str, list[list[float]]] = {term: [[] for _ in points] for term in TERMS}
    for turn in track(range(rounds + 1), label, console=Console(stderr=True), transient=True):
        for place, (context, rows, nodes) in enumerate(points):
            for term in TERMS:
                took = benches[context, rows].seconds(term, nodes)
                if turn:
                    found[term][place].append(took)
    return found


def memory(target: LeanTarget, bench: Bench, context: int) -> Result:
    """Measure the memory of a row's keys and values after some decoding, next to the formulas for slots and tokens."""
    config, data = target.config, bench.ctx.cache.data
    per_slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim * data.element_size()
    held = data.untyped_storage().nbytes() // data.shape[2]
    slots = bench.ctx.cache.num_slots
    return {
        "context": context,
        "bytes_per_slot": per_slot,
        "slots": slots,
        "bytes": held,
        "is_formula": held == per_slot * slots,
        "over_tokens": round(held / (per_slot * context), 3),
    }


# --- reporting -------------------------------------------------------------------------------------------------------


def panel(x: Sequence[int], samples: dict[str, list[list[float]]], fixed: dict[str, int]) -> Result:
    terms = {}
    for term, points in samples.items():
        medians = [statistics.median(each) for each in points]
        terms[term] = {"seconds": medians, **fit(x, medians), "samples": points}
    return {"x": list(x), "fixed": fixed, "terms": terms}


def table(name: str, found: Result) -> Table:
    fixed = ", ".join(f"{value} {what}" for what, value in found["fixed"].items())
    shown = Table(name, title=f"milliseconds by {name}; {fixed}")
    for term in TERMS:
        shown.add_column(term, justify="right")
        shown.add_column("exp.", justify="right")
    for place, x in enumerate(found["x"]):
        cells = []
        for term in found["terms"].values():
            growth = term["exponents"][place - 1] if place else None
            cells += [f"{1e3 * term['seconds'][place]:.2f}", "" if growth is None else f"{growth:.2f}"]
        shown.add_row(str(x), *cells)
    shown.add_section()
    shown.add_row("", *(cell for term in found["terms"].values() for cell in (verdict(term), "")))
    return shown


def memory_table(found: Sequence[Result]) -> Table:
    shown = Table("context", "slots", "MB a row", "bytes a slot", "by the formula", "over its tokens")
    for each in found:
        good = "[green]yes[/green]" if each["is_formula"] else "[red]NO[/red]"
        sizes = str(each["slots"]), f"{each['bytes'] / 1e6:.2f}", str(each["bytes_per_slot"])
        shown.add_row(str(each["context"]), *sizes, good, f"{each['over_tokens']:.2f}x")
    return shown


def draw(panels: dict[str, Result], title: str, png: Path) -> None:
    """Three panels; dotted, a line through the origin and the last point of the chain: growth as x."""
    figure, all_axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for axes, (name, found) in zip(all_axes, panels.items(), strict=True):
        x = found["x"]
        for term, fitted in found["terms"].items():
            axes.plot(x, [max(1e3 * each, 1e-3) for each in fitted["seconds"]], "o-", label=term)
        last = 1e3 * found["terms"]["chain"]["seconds"][-1]
        axes.plot(x, [last * each / x[-1] for each in x], "k:", lw=0.8, label="in proportion")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(x, [str(each) for each in x], rotation=45)
        fixed = ", ".join(f"{value} {what}" for what, value in found["fixed"].items())
        axes.set(xlabel=name, ylabel="milliseconds", title=fixed)
    all_axes[0].legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(png, dpi=110)
    plt.close(figure)


def doubling(text: str, name: str) -> list[int]:
    """``"1,2,4"`` -> [1, 2, 4]."""
    found = numbers(text, int)
    if not found or found[0] < 1 or any(high != 2 * low for low, high in itertools.pairwise(found)):
        raise typer.BadParameter(f"--{name} must double from one to the next such as 1,2,4,8, found {text!r}")
    return found


def plan_of(contexts: list[int], rows: list[int], nodes: list[int], fixed: Point) -> dict[str, list[Point]]:
    """The points of each panel."""
    context, num_rows, num_nodes = fixed
    return {
        "context": [(each, num_rows, num_nodes) for each in contexts],
        "rows": [(context, each, num_nodes) for each in rows],
        "nodes": [(context, num_rows, each) for each in nodes],
    }


def run(
    target: Path, weights: Weights, plan: dict[str, list[Point]], fixed: Point, rounds: int, scratch: Path
) -> Result:
    """Everything that is measured: panels, memory and settings."""
    room = max(context for points in plan.values() for context, _, _ in points) + MARGIN
    model = load_target(target, **weights)
    is_random = model.max_length < room
    if is_random:
        model = load_target(lengthened(target, scratch / "target", room), **weights)
    assert isinstance(model, LeanTarget)
    maker = load_drafter(random_head(model, scratch / "head"), model, None)
    ids = torch.randint(0, model.vocab_size, (room,), generator=torch.Generator().manual_seed(0)).tolist()
    panels, sizes = {}, []
    for place, (name, points) in enumerate(plan.items()):
        pairs = dict.fromkeys((context, num_rows) for context, num_rows, _ in points)
        benches = {(context, num): Bench(model, maker(), num, ids[: context + 1]) for context, num in pairs}
        samples = measure(points, benches, rounds, f"by {name}")
        stays = {what: fixed[index] for index, what in enumerate(plan) if what != name}
        panels[name] = panel([point[place] for point in points], samples, stays)
        if name == "context":
            sizes = [memory(model, bench, context) for (context, _), bench in benches.items()]
    settings = {
        "target": short(str(target)),
        "random_weights": is_random,
        "max_length": model.max_length,
        "weights": weights["quantize"],
        "dtype": weights["dtype"],
        "runtime": getattr(model, "runtime", "torch"),
        "head": "random EAGLE-3 of the target's shape",
        "rounds": rounds,
    }
    return {"panels": panels, "memory": sizes, "settings": settings}


def main(
    target: Annotated[Path, typer.Option(help="A folder of a lean family.")] = TOY / "target",
    quantize: Annotated[str | None, typer.Option(help="int8, or unchanged.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    contexts: Annotated[str, typer.Option(help="Tokens, doubling.")] = "128,256,512,1024,2048,4096,8192",
    rows: Annotated[str, typer.Option(help="Of the batch, doubling.")] = "1,2,4,8,16",
    nodes: Annotated[str, typer.Option(help="Of each row's tree, doubling.")] = "1,2,4,8,16,32,64",
    at: Annotated[str, typer.Option(help="CONTEXT,ROWS,NODES: values while another doubles.")] = "512,1,8",
    rounds: Annotated[int, typer.Option(min=1, help="One more warms up.")] = 9,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw them.")] = None,
) -> None:
    """Measure how a step grows with context, rows and nodes, and what a row takes.

    Examples:

    - `scaling.py --json OUT.json --png OUT.png`

    - `scaling.py --target FOLDER --quantize int8 --contexts 128,256,512,1024 --rows 1,2,4 --json OUT.json`
    """
    try:
        context, num_rows, num_nodes = map(int, at.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--at must be CONTEXT,ROWS,NODES such as 512,1,8, found {at!r}") from error
    fixed = context, num_rows, num_nodes
    axes = (doubling(contexts, "contexts"), doubling(rows, "rows"), doubling(nodes, "nodes"))
    with tempfile.TemporaryDirectory() as scratch:
        result = run(
            target, {"quantize": quantize, "dtype": dtype}, plan_of(*axes, fixed), fixed, rounds, Path(scratch)
        )
    console, settings = Console(), result["settings"]
    for name, found in result["panels"].items():
        console.print(table(name, found))
    console.print(memory_table(result["memory"]))
    title = f"{settings['target']}{' (random weights)' if settings['random_weights'] else ''}, {quantize or dtype}"
    console.print(f"[dim]{title}; draft levels of a {settings['head']}[/dim]")
    if png is not None:
        draw(result["panels"], title, png)
    if output is not None:
        where = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({**result, **where}) + "\n")


if __name__ == "__main__":
    typer.run(main)
