"""Find the context from which self-drafting gains, and compare it with the cost model.

    python benchmarks/long_context.py --json OUT.json
    python benchmarks/long_context.py --target smollm2-135m --views 256,512 --contexts 1024,2048,4096,7680 --rows 1,4

The baseline and chains drafted through a view take turns, block by block, in one batch of rows that keep growing, so
that a machine that slows down slows both. The gain of a step, tau baseline steps less the step's time, is linear in the
context; the measured inflection is its zero. Acceptance differs between texts, which hides that line: `alike` is the
zero with the acceptance of all texts together. The predictions need no long run: `costs` uses the measured draft,
`plain costs` only baseline steps (a draft step is then a baseline step of a text as long as the view), both with the
acceptance of all drafts. A target whose context is too short is stretched by YaRN.
"""

from __future__ import annotations

import json
import math
import statistics
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import draftwing as dw
from draftwing.budget.costs import Costs
from draftwing.lab.machine import describe_machine
from draftwing.loading import load_drafter, load_target
from draftwing.measure import measure
from draftwing.models.resolve import resolve
from draftwing.models.target import Target
from draftwing.text.tokenizer import Tokenizer
from plain_decoding import commit
from sweep import numbers, short

MARGIN = 256  # tokens of room beyond what is written: trees
COSTS_SECONDS = 20.0  # for the costs of one drafter
Point = tuple[int, int, int]  # view, rows, context


@dataclass
class Found:
    """One point: blocks of both kinds in turn.

    Attributes:
        plain: seconds of a plain step, block by block; drafted: of a drafting one.
        draft: seconds of its draft.
        emitted: tokens of each row and step, drafting.
        tries, taken: drafted tokens whose parents were accepted, and those of them that were.
    """

    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    emitted: list[float] = field(default_factory=list)
    tries: int = 0
    taken: int = 0

    @property
    def tau(self) -> float:
        return statistics.fmean(self.emitted)

    @property
    def alpha(self) -> float:
        return self.taken / self.tries if self.tries else 0.0

    @property
    def speedup(self) -> float:
        return self.tau * statistics.median(self.plain) / statistics.median(self.drafted)

    @property
    def gain(self) -> float:
        """Seconds that a drafting step saves."""
        return self.tau * statistics.median(self.plain) - statistics.median(self.drafted)

    def figures(self) -> dict[str, Any]:
        """Return JSON values."""
        seconds = {"plain_s": self.plain, "drafted_s": self.drafted, "draft_s": self.draft}
        return {"speedup": self.speedup, "tau": self.tau, "alpha": self.alpha, **seconds}


class Bench:
    """A batch of rows of one context."""

    def __init__(
        self, target: Target, drafter: dw.Drafter, prompts: Sequence[Sequence[int]], temperature: float
    ) -> None:
        self._decoder, self.found = dw.Decoder(target, drafter), Found()
        for seed, prompt in enumerate(prompts):
            sampling = dw.Sampling(max_tokens=target.max_length, ignore_eos=True, temperature=temperature, seed=seed)
            self._decoder.admit(prompt, sampling)

    def block(self, gamma: int, steps: int, *, counts: bool) -> None:
        """Run a number of steps; ``gamma`` 0 is the baseline."""
        self._decoder.budget = dw.Budget(gamma)
        done = [self._decoder.step() for _ in range(steps)]
        if not counts:
            return
        found, seconds = self.found, statistics.median(step.timings.total for step in done)
        if not gamma:
            found.plain.append(seconds)
            return
        found.drafted.append(seconds)
        found.draft.append(statistics.median(step.timings.draft for step in done))
        for step in done:
            found.emitted.append(statistics.fmean(1 + row.num_accepted for row in step.rows))
            found.tries += sum(min(row.num_accepted + 1, row.num_drafted) for row in step.rows)
            found.taken += sum(row.num_accepted for row in step.rows)


def crossing(contexts: Sequence[int], gains: Sequence[float]) -> float | None:
    """Return the context from which gains (seconds) stay positive; 0 if all are positive, None if the last is not."""
    if gains[-1] <= 0:
        return None
    for (low, less), (high, more) in reversed(list(pairwise(zip(contexts, gains, strict=True)))):
        if less <= 0:
            return low + (high - low) * -less / (more - less)
    return 0.0


def stretched(folder: Path, out: Path, max_length: int) -> Path:
    """The same model with a longer context by YaRN (2309.00071), as the folder ``out``: links, and another config."""
    config = json.loads((folder / "config.json").read_text())
    original = config["max_position_embeddings"]
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise typer.BadParameter(f"{folder} stretches its positions already: choose contexts below {original}")
    config["rope_parameters"] = {
        **rope, "rope_type": "yarn", "factor": math.ceil(max_length / original),
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config["max_position_embeddings"] = max_length
    out.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (out / file.name).symlink_to(file.resolve())
    (out / "config.json").write_text(json.dumps(config))
    return out


def prompts_of(text: Sequence[int], rows: int, context: int) -> list[list[int]]:
    """Cut one text per row, each from another position; the last token of each is pending."""
    if len(text) < context + rows:
        raise typer.BadParameter(
            f"the text has {len(text):,} tokens, too few for {rows} rows of {context:,}: give more with --text"
        )
    step = (len(text) - context - 1) // max(rows - 1, 1)
    return [list(text[row * step : row * step + context + 1]) for row in range(rows)]


def text_of(files: Sequence[Path] | None, tokenizer: Tokenizer, wanted: int) -> list[int]:
    """Return the token ids of files in order; by default of Python's standard library."""
    found: list[int] = []
    for file in files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(found) >= wanted:
            break
        found += tokenizer.encode(file.read_text(encoding="utf-8", errors="replace"))
    return found


def run(
    target: Target, text: Sequence[int], draft: str, points: Sequence[Point], gamma: int, size: tuple[int, int, float]
) -> dict[Point, Found]:
    """Every point by itself, so that only its rows are in memory. ``size``: rounds, steps of a block, temperature."""
    rounds, steps, temperature = size
    found = {}
    for view, rows, context in track(points, "decoding", console=Console(stderr=True), transient=True):
        drafter = load_drafter(draft, target, None, options={"budget": view})()
        bench = Bench(target, drafter, prompts_of(text, rows, context), temperature)
        for turn in range(rounds + 1):  # the first warms up
            for length in (0, gamma):
                bench.block(length, steps, counts=turn > 0)
        found[view, rows, context] = bench.found
    return found


def inflection_length(costs: Costs, tau: float, gamma: int, rows: int, view: int | None = None) -> float:
    """Return the context length from which chains of ``gamma`` gain (MagicDec 2408.11049, section 3).

    With longer contexts, reading the KV cache once for all nodes dominates, and T_V / T_T falls towards 1.

    Args:
        tau: expected tokens of a step.
        view: slots that a self-drafting target attends to: a draft step then costs a baseline step of that length.
            None: as measured.

    Returns:
        0 if they gain from the start, infinity if they never do.
    """
    draft = costs.draft_seconds(gamma, 1, rows) if view is None else gamma * costs.verify_seconds(1, rows, view)
    loss = draft + costs.verify_seconds(gamma + 1, rows, 0) - tau * costs.verify_seconds(1, rows, 0)  # per step
    if loss <= 0 and view is None:
        return 0.0
    gain = (tau * costs.token_seconds(1) - costs.token_seconds(gamma + 1)) * rows  # per token of context
    length = loss / gain if gain > 0 else math.inf
    return length if view is None else max(length, float(view))


def inflections(found: dict[Point, Found], costs: dict[int, Costs], gamma: int) -> list[dict[str, Any]]:
    """Measured and predicted, for each view and number of rows."""
    lines = []
    for view, rows in dict.fromkeys((view, rows) for view, rows, _ in found):
        own = {context: each for (v, r, context), each in found.items() if (v, r) == (view, rows)}
        alpha = sum(each.taken for each in own.values()) / max(sum(each.tries for each in own.values()), 1)
        tau = sum(alpha**depth for depth in range(gamma + 1))
        alike = [tau * statistics.median(each.plain) - statistics.median(each.drafted) for each in own.values()]
        by_costs, by_plain = (inflection_length(costs[view], tau, gamma, rows, seen) for seen in (None, view))
        lines.append(
            {
                "view": view,
                "rows": rows,
                "alpha": alpha,
                "measured": crossing(list(own), [each.gain for each in own.values()]),
                "alike": crossing(list(own), alike),
                "by_costs": by_costs if math.isfinite(by_costs) else None,
                "by_plain_costs": by_plain if math.isfinite(by_plain) else None,
            }
        )
    return lines


def show(found: dict[Point, Found], lines: Sequence[dict[str, Any]], title: str) -> None:
    """Both tables."""
    console, points = Console(), Table("view", "rows", "context", "plain ms", "draft ms", "tau", "alpha", "speedup")
    for (view, rows, context), each in found.items():
        times = f"{1e3 * statistics.median(each.plain):.2f}", f"{1e3 * statistics.median(each.draft):.2f}"
        points.add_row(
            str(view), str(rows), str(context), *times, f"{each.tau:.2f}", f"{each.alpha:.3f}", f"{each.speedup:.2f}x"
        )
    console.print(points)
    table = Table(
        "view", "rows", "alpha", "inflection", "alike", "by costs", "by plain costs", title="tokens from which it gains"
    )
    for line in lines:
        told = [line["measured"], line["alike"], line["by_costs"], line["by_plain_costs"]]
        lengths = ["never" if each is None else f"{each:,.0f}" for each in told]
        table.add_row(str(line["view"]), str(line["rows"]), f"{line['alpha']:.3f}", *lengths)
    console.print(table)
    console.print(f"[dim]{title}[/dim]")


def main(
    target: Annotated[str | None, typer.Option(help="A folder or a name; the shipped one unless given.")] = None,
    draft: Annotated[str, typer.Option(help="self-window or self-snapkv.")] = "self-window",
    views: Annotated[str, typer.Option(help="Slots that a draft reads.")] = "512",
    contexts: Annotated[str, typer.Option(help="Tokens of each row's text, rising.")] = "1024,2048,4096,8192",
    rows: Annotated[str, typer.Option(help="Of the batch.")] = "1",
    gamma: Annotated[int, typer.Option(min=1, help="Tokens of a chain.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Of a block.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="One more warms up.")] = 5,
    temperature: Annotated[float, typer.Option("--temperature", "-T", min=0.0)] = 0.0,
    text: Annotated[list[Path] | None, typer.Option(help="Files to continue; repeatable.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8, or unchanged.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure the context from which self-drafting gains, next to the cost model's."""
    sizes, lengths, batches = numbers(views, int), sorted(numbers(contexts, int)), numbers(rows, int)
    if not sizes or not lengths or not batches or min(*sizes, *lengths, *batches) < 1:
        raise typer.BadParameter("--views, --contexts and --rows are whole numbers from 1 on, such as 256,512")
    room = lengths[-1] + (rounds + 1) * steps * (gamma + 2) + MARGIN
    folder = resolve(target)
    with tempfile.TemporaryDirectory() as scratch:
        model = load_target(folder, quantize=quantize)
        is_stretched = model.max_length < room
        if is_stretched:
            model = load_target(stretched(folder, Path(scratch) / "target", room), quantize=quantize)
        ids = text_of(text, Tokenizer(folder), 2 * batches[-1] * room)
        points = [(view, num, length) for view in sizes for num in batches for length in lengths]
        found = run(model, ids, draft, points, gamma, (rounds, steps, temperature))
        costs = {}
        for view in sizes:
            maker = load_drafter(draft, model, None, options={"budget": view})
            costs[view] = measure(model, maker, COSTS_SECONDS, long=lengths[-1])
    lines = inflections(found, costs, gamma)
    title = (
        f"{short(target)}{' (stretched)' if is_stretched else ''}, {draft}, chains of {gamma}, {quantize or 'float32'}"
    )
    show(found, lines, title)
    if output is not None:
        result = {
            "points": [{"view": v, "rows": r, "context": c, **each.figures()} for (v, r, c), each in found.items()],
            "inflections": lines,
            "costs": {str(view): asdict(each) for view, each in costs.items()},
            "settings": {
                "target": short(target), "stretched": is_stretched, "draft": draft, "gamma": gamma, "steps": steps,
                "rounds": rounds, "temperature": temperature, "weights": quantize, "runtime": model.runtime,
            },
            "machine": describe_machine(), "date": datetime.now(UTC).date().isoformat(), "commit": commit(),
        }  # fmt: skip
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    typer.run(main)
