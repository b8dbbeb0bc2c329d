"""Heads for a chat model: EAGLE-3 and EAGLE-1 for SmolLM2-135M-Instruct, from prompts to what is shipped.

    python recipes/chat_heads.py answers --prompts prompts.jsonl     # the target's own words: hours on two cores
    python recipes/chat_heads.py train                               # resumes where it was stopped
    python recipes/chat_heads.py export                              # bfloat16, with cards, into the package

Each step runs the command that a user would run for a model of their own, and says it. Every step goes on where it was
stopped. The prompts are dialogues in any form that ``draftwing data regenerate`` reads; half of them are answered
greedily, half at temperature 1, since a head has to guess both.
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
from draftwing.train.evaluate import validation_prompts
from draftwing.train.feature_cache import FeatureCache
from draftwing.train.options import TrainOptions
from draftwing.train.session import split_cache

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Option(help="Folder of answers, features and runs.")]
Target = Annotated[str, typer.Option(help="Folder, GGUF file or name.")]

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


def run(*words: str) -> None:
    """Say a command, and run it in this Python."""
    typer.echo(f"$ draftwing {shlex.join(words)}", err=True)
    code = subprocess.call([sys.executable, "-m", "draftwing.cli.main", *words])
    if code:
        raise typer.Exit(code)


@app.command()
def answers(
    prompts: Annotated[list[str], typer.Option(help="JSONL files of prompts; repeatable.")],
    out: Out = Path("build/chat-heads"),
    target: Target = TARGET,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 256,
    max_batch: Annotated[int, typer.Option(help="Prompts decoded at once.")] = 64,
) -> None:
    """Let the target answer, and keep its hidden states: 4.6 kB a token."""
    data = [word for each in prompts for word in ("--data", each)]
    places = ["--out", str(out / "answers.jsonl"), "--features", str(out / "features")]
    how = ["-T", "0,1", "--max-tokens", str(max_tokens), "--max-batch", str(max_batch), "--quantize", "int8"]
    run("data", "regenerate", "--target", target, *data, *places, *how)


@app.command()
def train(
    out: Out = Path("build/chat-heads"),
    target: Target = TARGET,
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(RUNS)}; default all.")] = None,
    minutes: Annotated[float, typer.Option(help="Of each head.")] = 180,
    after: Annotated[Path | None, typer.Option(help="OUT of a run before, whose heads these begin as.")] = None,
) -> None:
    """Train the heads one after the other; a run that is complete is skipped."""
    for name, options in RUNS.items():
        if only in (None, name):
            said = [word for pair in options.items() for word in pair]
            where = ["--target", target, "--cache", str(out / "features"), "--out", str(out / name)]
            if after is not None:
                where += ["--init-from", str(after / name / "head")]
            run("train", name, *where, "--minutes", str(minutes), "--licence", "Apache-2.0", *said)


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


def held_out_prompts(out: Path) -> list[list[int]]:
    """What training held out, up to the answers."""
    whole = FeatureCache(out / "features").cut(TrainOptions("eagle3", iterations=1).max_length)
    _, held = split_cache(whole, float(COMMON["--validation-share"]), seed=0)
    return validation_prompts(held.corpus, int(COMMON["--forecast-prompts"]))


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
    """Write the heads in bfloat16, with cards, the prompts that they are tried on, and what forecasts are made of."""
    measured = [group for file in results or [] for group in json.loads(file.read_text())["groups"]]
    folder = resolve(target)
    model = load_target(folder, prepack=False)
    tokenizer = Tokenizer(folder)
    own, fast = target_id(model, tokenizer, TARGET), load_target(folder, quantize="int8", name=TARGET)
    prompts = fitting(held_out_prompts(out), fast)
    for name in RUNS:
        source, known = out / name / "head", _statistics(to / name)
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
