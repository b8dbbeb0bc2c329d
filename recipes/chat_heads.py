"""Heads for a chat model: EAGLE-3 and EAGLE-1 for SmolLM2-135M-Instruct, from prompts to what is shipped.

    python recipes/chat_heads.py answers --prompts prompts.jsonl     # the target's own words: hours on two cores
    python recipes/chat_heads.py train                               # resumes a stopped run
    python recipes/chat_heads.py export                              # bfloat16, with cards, into the package

On a GPU, in nine minutes, from the head of an earlier run, as for the head that is shipped:

    python recipes/chat_heads.py answers --prompts prompts.jsonl --device cuda --processes 4 --max-batch 128 --passes 2
    python recipes/chat_heads.py train --device cuda --only eagle3 --minutes 6.1 --after EARLIER

Each step prints the command that a user would run for another model, runs it, and continues if it was stopped. The
prompts are dialogues in any form that ``draftwing data regenerate`` reads; half of them are answered greedily, half at
temperature 1, since a head has to predict both.

On a GPU, answers are in bfloat16 and no hidden states are stored: computing them again is faster than reading them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from draftwing.cli.progress import progress
from draftwing.errors import CheckpointError
from draftwing.formats.card import copy_stored, write_card
from draftwing.formats.identity import head_id, target_id
from draftwing.formats.read import read_head
from draftwing.formats.write import write_head
from draftwing.lab.forecast import HeldOut, collect, fitting
from draftwing.loading import load_drafter, load_target
from draftwing.models.resolve import resolve
from draftwing.shipped import SHIPPED
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.data import read_examples, split
from draftwing.train.evaluate import validation_prompts
from draftwing.train.feature_cache import FeatureCache
from draftwing.train.options import TrainOptions
from draftwing.train.session import split_cache

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Option(help="Folder of answers, features and runs.")]
Target = Annotated[str, typer.Option(help="Folder, GGUF file or name.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]

TARGET = "smollm2-135m-instruct"
COMMON = {
    "--tokens-per-batch": "2048",
    "--later-share": "0.15",
    "--validation-share": "0.02",
    "--eval-every": "400",
    "--eval-prompts": "24",
    "--forecast-prompts": "40",
}
RUNS: dict[str, dict[str, str]] = {
    "eagle3": {**COMMON, "--lr": "2e-3", "--draft-vocab-size": "8192", "--unroll-steps": "5"},
    "eagle1": {**COMMON, "--lr": "1e-3", "--loss-vocab-size": "8192", "--unroll-steps": "3"},
}
ON_GPU = {"--tokens-per-batch": "8192", "--later-share": "0.25", "--lr": "2.5e-3", "--eval-every": "500"}


def answered(out: Path) -> list[Path]:
    return sorted(out.glob("answers-*.jsonl"))


def run(*commands: list[str]) -> None:
    """Print commands, and run them at the same time in this Python."""
    for words in commands:
        typer.echo(f"$ draftwing {shlex.join(words)}", err=True)
    running = [subprocess.Popen([sys.executable, "-m", "draftwing", *words]) for words in commands]
    code = max(process.wait() for process in running)
    if code:
        raise typer.Exit(code)


@app.command()
def answers(
    prompts: Annotated[list[Path], typer.Option(help="JSONL files of prompts; repeatable.")],
    out: Out = Path("build/chat-heads"),
    target: Target = TARGET,
    device: Device = "cpu",
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 256,
    max_batch: Annotated[int, typer.Option(help="Prompts decoded at once.")] = 64,
    processes: Annotated[int, typer.Option(min=1, help="That share the prompts: Python alone cannot fill a GPU.")] = 1,
    passes: Annotated[int, typer.Option(min=1, max=2, help="The second one swaps the prompts' temperatures.")] = 1,
) -> None:
    """Let the target answer; one process on a CPU also keeps its hidden states: 4.6 kB a token."""
    how = ["--max-tokens", str(max_tokens), "--max-batch", str(max_batch), "--device", device]
    how += ["--quantize", "int8"] if device == "cpu" else ["--dtype", "bfloat16", "--draft", "none"]
    if device == "cpu" and processes == 1:
        how += ["--features", str(out / "features")]
    out.mkdir(parents=True, exist_ok=True)
    lines = [line for file in prompts for line in file.read_text(encoding="utf-8").splitlines()]
    shares = [out / f"prompts-{index}.jsonl" for index in range(processes)]
    for index, share in enumerate(shares):
        share.write_text("".join(f"{line}\n" for line in lines[index::processes]), encoding="utf-8")
    for name, temperatures in [("answers", "0,1"), ("answers-swapped", "1,0")][:passes]:
        commands = []
        for index, share in enumerate(shares):
            files = ["--data", str(share), "--out", str(out / f"{name}-{index}.jsonl"), "--seed", str(index)]
            commands.append(["data", "regenerate", "--target", target, "-T", temperatures, *files, *how])
        run(*commands)


@app.command()
def train(
    out: Out = Path("build/chat-heads"),
    target: Target = TARGET,
    device: Device = "cpu",
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(RUNS)}; default all.")] = None,
    minutes: Annotated[float, typer.Option(help="Of each head.")] = 180,
    after: Annotated[Path | None, typer.Option(help="OUT of an earlier run, whose heads these start from.")] = None,
) -> None:
    """Train the heads one after the other; a run that is complete is skipped."""
    if (out / "features").exists():
        data = ["--cache", str(out / "features")]
    else:
        data = [word for file in answered(out) for word in ("--data", str(file))]
    for name, options in RUNS.items():
        if only in (None, name):
            changes = {} if device == "cpu" else ON_GPU
            where = ["--target", target, *data, "--out", str(out / name), "--device", device]
            if after is not None:
                where += ["--init-from", str(after / name / "head")]
            settings = [word for pair in (options | changes).items() for word in pair]
            run(["train", name, *where, "--minutes", str(minutes), "--licence", "Apache-2.0", *settings])


def measured_of(name: str, groups: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, str]]]:
    """What was measured of a head, a line for each set, temperature and tree: for its card."""
    for group in groups:
        settings = group["settings"]
        precision = settings["dtype"] if settings["quantize"] == "none" else settings["quantize"]
        for row in group["rows"]:
            if row["category"] is None and row["turn"] is None and name in Path(row["draft"]).parts:
                figures = {figure: f"{row[figure]['value']:.2f}" for figure in ("tau", "speedup")}
                where = f"{row['set']}, {row['sampling']}, {row['budget']}, {precision}"
                yield where, {**figures, "same text": f"{row['num_identical']} of {row['num_answers']}"}


def held_out_prompts(out: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """What training held out, up to the answers."""
    share, length = float(COMMON["--validation-share"]), TrainOptions("eagle3", iterations=1).max_length
    if (out / "features").exists():
        _, cache = split_cache(FeatureCache(out / "features").cut(length), share, seed=0)
        held = cache.corpus
    else:
        _, held = split(read_examples([str(file) for file in answered(out)], tokenizer, max_length=length), share, 0)
    return validation_prompts(held, int(COMMON["--forecast-prompts"]))


def _statistics(head: Path) -> HeldOut | None:
    """What forecasts of a head are made of, where that was collected before; writing a head removes it."""
    try:
        return HeldOut.read(head)
    except CheckpointError:
        return None


@app.command()
def export(
    out: Out = Path("build/chat-heads"),
    to: Annotated[Path, typer.Option(help="Folder that gets eagle3/ and eagle1/.")] = SHIPPED / TARGET,
    target: Target = TARGET,
    results: Annotated[list[Path] | None, typer.Option(help="results.json of `draftwing bench`; repeatable.")] = None,
) -> None:
    """Write trained heads in bfloat16, with cards, the prompts that they are tried on, and statistics for forecasts."""
    measured = [group for file in results or [] for group in json.loads(file.read_text())["groups"]]
    folder = resolve(target)
    model = load_target(folder, prepack=False)
    tokenizer = Tokenizer(folder)
    own, fast = target_id(model, tokenizer, TARGET), load_target(folder, quantize="int8", name=TARGET)
    prompts = fitting(held_out_prompts(out, tokenizer), fast)
    for name in RUNS:
        source, known = out / name / "head", _statistics(to / name)
        if not source.exists():
            continue
        net = read_head(source, model.embedding, model.head, own, torch.bfloat16)
        training: dict[str, Any] = json.loads((source / "config.json").read_text())["draftwing"]["training"]
        found = dict(measured_of(name, measured))
        write_head(to / name, net, training={**training, "results": found} if found else training)
        copy_stored(source, to / name)
        write_card(to / name)
        if known is None or known.head != head_id(to / name):
            with progress("collecting statistics for forecasts") as on_progress:
                drafter = load_drafter(to / name, fast, tokenizer)
                known = collect(fast, drafter, head_id(to / name), prompts, on_progress=on_progress)
        known.write(to / name)
        typer.echo(f"wrote {to / name}")


if __name__ == "__main__":
    app()
