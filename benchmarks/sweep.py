"""Check that the automatic budget is never slower than the baseline, and as good as the best fixed tree.

    python benchmarks/sweep.py --prompts chat=mt_bench.jsonl --json OUT.json --png OUT.png
    python benchmarks/sweep.py --draft lookup --chains 1,2,4,8,16 --json OUT.json --resume
    python benchmarks/sweep.py --target FOLDER --draft HEAD --quantize int8 --num-prompts 4 --tokens 64 --json OUT.json

The baseline, the automatic budget and every fixed tree decode each prompt in turn, on one target in memory, in a new
random order for each prompt of a round, since a large tree leaves cold caches behind. The baseline runs twice: the
ratio of both shows this machine's noise. Only decoding counts, not the prefill. A rate is all tokens of a round over
all its seconds; figures are medians over rounds, ratios are medians of the ratios within rounds.

The automatic budget learns over all rounds of a set at one temperature, and starts the next set without that. An
uncounted prompt warms up every candidate. The best fixed tree is chosen in hindsight: as the best of many measurements,
it is slightly overestimated.

The JSON file is written after every set, so that a run may be killed: --resume does the remaining sets.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import draftwing as dw
from draftwing.cli.options import Drafting, SamplingOptions
from draftwing.lab.machine import describe_machine
from draftwing.lm import LM, Generation
from draftwing.loading import load_drafter
from draftwing.text.prompts import Prompt, read_prompts, shipped_prompts
from plain_decoding import commit

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PLAIN, AGAIN, AUTO = "plain", "plain again", "auto"
NEVER_SLOWER, NEAR_BEST = 0.97, 0.95  # least shares of the baseline's rate, and of the best fixed tree's
RANDOM_LENGTH = 64  # tokens of a random prompt
KNOWN = {"prompt", "text", "messages", "turns"}  # the keys that read_prompts knows

Entry = dict[str, Any]  # one set at one temperature, as in the JSON file


@dataclass(frozen=True)
class Settings:
    """The settings of all sets of a file."""

    target: str
    draft: str
    weights: str | None
    num_prompts: int
    tokens: int
    rounds: int
    seed: int
    candidates: tuple[str, ...]


# --- candidates and prompts ------------------------------------------------------------------------------------------


def numbers(text: str, kind: type) -> list[Any]:
    """``"0,1"`` -> [0, 1], each once."""
    try:
        found = list(dict.fromkeys(kind(each) for each in text.split(",") if each.strip()))
    except ValueError as error:
        raise typer.BadParameter(f"expected comma-separated numbers such as 1,2,4, found {text!r}") from error
    return found


def fixed_budgets(chains: str, trees: str) -> dict[str, dw.Budget]:
    """``"1,2"`` and ``"8,4,2 60,8,10"`` -> budgets by name, in this order."""
    names = [f"chain:{length}" for length in numbers(chains, int)]
    names += [f"dynamic:{each}" for each in trees.split()]
    budgets = {name: Drafting(tree=name).budget() for name in names}
    found = {name: budget for name, budget in budgets.items() if budget is not None}
    if not found:
        raise typer.BadParameter("there is no fixed tree to compare with: give --chains or --trees")
    return found


def split_names(given: Sequence[str]) -> dict[str, Path]:
    """``["chat=mt_bench.jsonl"]`` -> {"chat": Path("mt_bench.jsonl")}."""
    files = {}
    for each in given:
        name, found, file = each.partition("=")
        if not (name and found and file) or name in ("code", "random") or name in files:
            raise typer.BadParameter(
                f"--prompts must be NAME=FILE, each name once and none of code and random, found {each!r}"
            )
        files[name] = Path(file)
    return files


def read_set(file: Path, limit: int) -> list[Prompt]:
    """Read prompts in the forms of ``read_prompts``, or lines with a ``question`` (like GSM8K)."""
    if file.suffix == ".jsonl" and file.exists():
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][:limit]
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        asked = [str(entry["question"]) for entry in entries if "question" in entry and not entry.keys() & KNOWN]
        if asked and len(asked) == len(lines):
            return list(asked)
    return read_prompts(file, limit)


def prompts_of(name: str, files: dict[str, Path], lm: LM, settings: Settings) -> list[list[int]]:
    """Return the ids of a set's prompts, one for the warm-up first; cut to the target's context."""
    count, room = settings.num_prompts + 1, lm.target.max_length - settings.tokens - 1
    if name == "random":
        draw = torch.Generator().manual_seed(settings.seed)
        length = max(1, min(RANDOM_LENGTH, room))
        return torch.randint(0, lm.target.vocab_size, (count, length), generator=draw).tolist()
    prompts = list(shipped_prompts(count)) if name == "code" else read_set(files[name], count)
    put = SamplingOptions(chat=lm.tokenizer.has_chat_template).put
    ids = [lm.encode(put(prompt, lm.tokenizer))[: max(1, room)] for prompt in prompts]
    return ids if len(ids) > 1 else ids * 2  # a lone prompt warms up too


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    lms: dict[str, LM], prompts: list[list[int]], sampling: dw.Sampling, rounds: int, tick: Callable[[], None]
) -> dict[str, Entry]:
    """Measure every candidate on ``prompts[1:]``; the first prompt warms up.

    Args:
        lms: by name, including the baseline; all on one target.
        tick: called after each generation.
    """
    names = list(lms)
    for lm in lms.values():
        lm.generate([prompts[0]], sampling)
        tick()
    runs: dict[str, list[list[Generation]]] = {name: [[] for _ in range(rounds)] for name in names}
    draw = random.Random(sampling.seed)
    for turn in range(rounds):
        for index, prompt in enumerate(prompts[1:]):
            for name in draw.sample(names, len(names)):
                runs[name][turn] += lms[name].generate([prompt], sampling, seed=sampling.seed + index)
                tick()
    return {name: fold(own, runs[PLAIN]) for name, own in runs.items()}


def fold(rounds: list[list[Generation]], plain: list[list[Generation]]) -> Entry:
    """Summarise one candidate."""
    stats = [dw.Stats.sum(run.stats for run in runs) for runs in rounds]
    total = dw.Stats.sum(stats)
    same = [
        [one.token_ids == other.token_ids for one, other in zip(*pair, strict=True)]
        for pair in zip(rounds, plain, strict=True)
    ]
    seconds = max(total.total_seconds, 1e-9)
    return {
        "tokens_per_s": [round(each.num_tokens / max(each.total_seconds, 1e-9), 3) for each in stats],
        "num_tokens": stats[0].num_tokens,
        "tau": round(total.tau, 3),
        "drafted_per_step": round(total.num_drafted / max(total.num_forwards, 1), 2),
        "phases": {phase: round(value / seconds, 3) for phase, value in total.seconds.items()},
        "num_identical": sum(map(all, zip(*same, strict=True))),  # in every round
    }


def summary(candidates: dict[str, Entry]) -> Entry:
    """Compare the automatic budget with the baseline and with the best fixed tree on one set."""

    def ratio(one: str, other: str) -> float:
        pairs = zip(candidates[one]["tokens_per_s"], candidates[other]["tokens_per_s"], strict=True)
        return float(statistics.median(a / b for a, b in pairs))

    fixed = [name for name in candidates if name not in (PLAIN, AGAIN, AUTO)]
    speedups = {name: ratio(name, PLAIN) for name in [*fixed, AUTO]}
    best = max(fixed, key=lambda name: speedups[name])
    auto = candidates[AUTO]
    return {
        "plain_tokens_per_s": statistics.median(candidates[PLAIN]["tokens_per_s"]),
        "speedups": speedups,
        "best_fixed": best,
        "auto_over_plain": speedups[AUTO],
        "again_over_plain": ratio(AGAIN, PLAIN) if AGAIN in candidates else None,
        "auto_over_best": ratio(AUTO, best),
        "efficiency": speedups[AUTO] / auto["tau"],
        "never_slower": speedups[AUTO] >= NEVER_SLOWER,
        "near_best": ratio(AUTO, best) >= NEAR_BEST,
        "num_identical": sum(each["num_identical"] for each in candidates.values()),
        "num_compared": len(candidates) * candidates[PLAIN]["num_identical"],
    }


# --- reporting -------------------------------------------------------------------------------------------------------


def title(entry: Entry) -> str:
    return f"{entry['set']} T={entry['temperature']:g}"


def row(entry: Entry) -> list[str]:
    found, auto = summary(entry["candidates"]), entry["candidates"][AUTO]
    best = found["best_fixed"]
    same, of = found["num_identical"], found["num_compared"]

    def mark(passed: bool) -> str:
        return "[green]pass[/green]" if passed else "[red]FAIL[/red]"

    return [
        title(entry),
        f"{found['plain_tokens_per_s']:.1f}",
        f"{found['auto_over_plain']:.3f} {mark(found['never_slower'])}",
        "" if found["again_over_plain"] is None else f"{found['again_over_plain']:.3f}",
        f"{auto['tau']:.2f}",
        f"{found['efficiency']:.2f}",
        f"{best} {found['speedups'][best]:.2f}x",
        f"{found['auto_over_best']:.3f} {mark(found['near_best'])}",
        f"{same} of {of}" if same == of else f"[red]{same} of {of}: NO[/red]",
    ]


def table(entries: Sequence[Entry], settings: Settings) -> Table:
    how = f"{settings.target}, {settings.draft}, {settings.weights or 'float32'}, batch 1"
    found = Table(title=f"{how}; auto / plain must be {NEVER_SLOWER}, auto / best fixed {NEAR_BEST}")
    speeds = "plain tok/s", "auto / plain", "again / plain", "tau", "eff.", "best fixed", "auto / best"
    for name in ("set", *speeds, "same text"):
        found.add_column(name, justify="left" if name == "set" else "right")
    for entry in entries:
        found.add_row(*row(entry))
    return found


def draw(entries: Sequence[Entry], settings: Settings, png: Path) -> None:
    """Draw a group of bars for each set: fixed trees faint, the automatic budget strong, the baseline as a line."""
    names = [name for name in settings.candidates if name not in (PLAIN, AGAIN)]
    figure, axes = plt.subplots(figsize=(max(6.0, 2.2 * len(entries)), 4), layout="constrained")
    width = 0.85 / len(names)
    chains = sum(name.startswith("chain") for name in names)
    for place, name in enumerate(names):
        is_chain = name.startswith("chain")
        shade = (place + 1) / chains if is_chain else (place + 1 - chains) / max(len(names) - 1 - chains, 1)
        color = "tab:red" if name == AUTO else plt.get_cmap("Blues" if is_chain else "Greens")(0.15 + 0.35 * shade)
        at = [index + (place + 0.5) * width - 0.425 for index in range(len(entries))]
        heights = [summary(entry["candidates"])["speedups"][name] for entry in entries]
        axes.bar(at, heights, width, color=color, label=name, zorder=2)
    axes.axhline(1, color="black", lw=0.8, zorder=3)
    axes.set_xticks(range(len(entries)), [title(entry) for entry in entries])
    axes.set(ylabel="times baseline decoding", title=f"{settings.target}, {settings.draft}")
    axes.legend(fontsize=6, ncol=2)
    figure.savefig(png, dpi=110)
    plt.close(figure)


# --- one file of results ---------------------------------------------------------------------------------------------


def save(output: Path, settings: Settings, entries: Sequence[Entry]) -> None:
    """Write the file atomically, since a run may be killed at any time."""
    sets = [{**entry, "summary": summary(entry["candidates"])} for entry in entries]
    bars = {"auto_over_plain": NEVER_SLOWER, "auto_over_best": NEAR_BEST}
    where = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat(), "commit": commit()}
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = output.with_name(output.name + ".partial")
    fresh.write_text(json.dumps({"settings": asdict(settings), "bars": bars, "sets": sets, **where}, indent=2) + "\n")
    os.replace(fresh, output)


def resume(output: Path, settings: Settings) -> list[Entry]:
    """Return the sets that a file has; none if there is no file.

    Raises:
        typer.BadParameter: they were measured with other settings.
    """
    if not output.exists():
        return []
    held = json.loads(output.read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(asdict(settings)))
    for name, value in wanted.items():
        if held["settings"].get(name) != value:
            raise typer.BadParameter(
                f"{output} was measured with {name} {held['settings'].get(name)!r}, this run asks for {value!r}: give "
                f"the same, or another --json"
            )
    return list(held["sets"])


def short(name: str | None) -> str:
    """Return the last two parts of a path, which identify a model."""
    return "shipped" if name is None else "/".join(Path(name).parts[-2:])


def run(
    plain: LM,
    maker: Callable[[], dw.Drafter],
    budgets: dict[str, dw.Budget],
    sets: dict[tuple[str, float], list[list[int]]],
    settings: Settings,
    done: Callable[[Entry], None],
) -> None:
    """Measure one set after the other; ``done`` gets each finished one."""
    total = sum(len(settings.candidates) * (1 + settings.rounds * (len(ids) - 1)) for ids in sets.values())
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*bar, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decoding", total=total)
        for (name, temperature), ids in sets.items():
            progress.update(task, description=f"{name} T={temperature:g}")
            lms = {PLAIN: plain, AGAIN: plain}
            for candidate, budget in [*budgets.items(), (AUTO, None)]:
                lms[candidate] = LM(plain.target, plain.tokenizer, maker, budget=budget)
            sampling = dw.Sampling(temperature=temperature, max_tokens=settings.tokens, seed=settings.seed)
            found = measure(lms, ids, sampling, settings.rounds, lambda: progress.advance(task))
            done(
                {
                    "set": name,
                    "temperature": temperature,
                    "num_prompts": len(ids) - 1,
                    "candidates": found,
                    "runtime": getattr(plain.target, "runtime", "torch"),
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "commit": commit(),
                }
            )


def main(
    target: Annotated[str | None, typer.Option(help="Folder or hub id. [default: the shipped one]")] = None,
    draft: Annotated[str, typer.Option(help="A head, a draft model, or lookup.")] = "eagle3",
    quantize: Annotated[str | None, typer.Option(help="int8, or unchanged.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="NAME=FILE.jsonl: one more set; repeatable.")] = None,
    code: Annotated[bool, typer.Option(help="The set of shipped held-out Python prompts.")] = True,
    random_ids: Annotated[bool, typer.Option("--random/--no-random", help="The set of random token ids.")] = True,
    temperatures: Annotated[str, typer.Option(help="Each set is decoded at each of them.")] = "0,1",
    chains: Annotated[str, typer.Option(help="Lengths of fixed chains.")] = "1,2,3,4,5,6,8",
    trees: Annotated[
        str, typer.Option(help="Fixed dynamic trees: NODES,DEPTH,WIDTH with spaces between them.")
    ] = "8,4,2 16,5,4 32,6,8 60,8,10",
    num_prompts: Annotated[int, typer.Option(min=1, help="Of each set, and one more to warm up.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to write at most.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every prompt with every candidate.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of random prompts, and of sampling.")] = 0,
    go_on: Annotated[bool, typer.Option("--resume", help="Skip the sets that the JSON file holds.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here after every set.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw them.")] = None,
) -> None:
    """Compare the automatic budget with baseline decoding and with fixed trees, set by set.

    Examples:

    - `sweep.py --prompts chat=mt_bench.jsonl --json OUT.json --png OUT.png`

    - `sweep.py --draft lookup --chains 1,2,4,8,16 --no-random --temperatures 0 --json OUT.json --resume`

    - `sweep.py --target FOLDER --draft HEAD --quantize int8 --num-prompts 4 --tokens 64 --json OUT.json`
    """
    files, budgets = split_names(prompts or []), fixed_budgets(chains, trees)
    names = ["code"] * code + [*files] + ["random"] * random_ids
    candidates = (PLAIN, AGAIN, *budgets, AUTO)
    settings = Settings(short(target), short(draft), quantize, num_prompts, tokens, rounds, seed, candidates)
    if output is not None and output.exists() and not go_on:
        raise typer.BadParameter(f"{output} exists: add --resume to continue it, or delete it")
    entries = resume(output, settings) if output is not None else []
    held = {(entry["set"], entry["temperature"]) for entry in entries}
    todo = [(name, heat) for name in names for heat in numbers(temperatures, float) if (name, heat) not in held]
    errors = Console(stderr=True, soft_wrap=True)

    def done(entry: Entry) -> None:
        entries.append(entry)
        if output is not None:
            save(output, settings, entries)
        errors.print("  ".join(row(entry)))

    if todo:
        plain = dw.load(target, "none", quantize=quantize)
        maker = load_drafter(draft, plain.target, plain.tokenizer)
        ids = {name: prompts_of(name, files, plain, settings) for name, _ in todo}
        try:
            run(plain, maker, budgets, {(name, heat): ids[name] for name, heat in todo}, settings, done)
        except KeyboardInterrupt:
            errors.print("interrupted" + (f": finished sets are in {output}, --resume does the rest" if output else ""))
            raise typer.Exit(130) from None
    Console().print(table(entries, settings))
    if png is not None and entries:
        draw(entries, settings, png)


if __name__ == "__main__":
    typer.run(main)
