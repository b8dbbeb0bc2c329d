"""The toy heads: EAGLE-3 and EAGLE-1.

    python recipes/demo_heads.py answers --out build/heads       # the target's own text: minutes
    python recipes/demo_heads.py train   --out build/heads       # resumes where it was stopped; 20 minutes
    python recipes/demo_heads.py export  --out build/heads --to src/draftwing/shipped
    python recipes/demo_heads.py statistics --of src/draftwing/shipped/toy  # for `draftwing predict`: minutes

The training text is what the target itself writes (greedily, after beginnings cut from the training files), which is
what a head has to guess; and a part of the training files themselves, which is what sampled text looks like.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import corpus
import draftwing as dw
from draftwing.formats.identity import head_id, target_id
from draftwing.formats.read import read_head
from draftwing.formats.write import write_head
from draftwing.lab.forecast import collect
from draftwing.loading import load_target
from draftwing.shipped import TOY
from draftwing.text.prompts import shipped_prompts
from draftwing.text.tokenizer import Tokenizer
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, prepare

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Option(help="Folder of texts and runs.")]

COMMON = {"optimizer": "muon", "tokens_per_batch": 2048, "eval_every": 400, "eval_prompts": 12}
TEXTS, FILES = "texts.jsonl", "files.jsonl"
RUNS: dict[str, dict[str, Any]] = {
    "eagle3": {
        **COMMON,
        "method": "eagle3",
        "later_share": 0.34,
        "unroll_steps": 6,
        "draft_vocab_size": 1024,
        "minutes": 12,
    },
    "eagle1": {**COMMON, "method": "eagle1", "minutes": 6},
}


def beginnings(num: int, seed: int) -> list[str]:
    """Cut from training files at the start of a line: a few hundred characters each."""
    rng = random.Random(seed)
    documents = [text for _, text in corpus.documents(held_out=False) if len(text) > 1500]
    found: list[str] = []
    while len(found) < num:
        lines = rng.choice(documents).splitlines(keepends=True)
        end = rng.randrange(8, max(9, len(lines)))
        text = "".join(lines[max(0, end - rng.randint(8, 24)) : end]).rstrip("\n")
        if 200 <= len(text) <= 1600:
            found.append(text)
    return found


@app.command()
def answers(
    out: Out = Path("build/heads"),
    num: Annotated[int, typer.Option(help="Texts of 256 tokens that the target writes greedily.")] = 2496,
    characters: Annotated[int, typer.Option(help="Of the training files, beside them.")] = 1_800_000,
) -> None:
    """Write texts.jsonl; run again to go on."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / TEXTS
    done = len(file.read_text().splitlines()) if file.exists() else 0
    lm = dw.load("toy", draft="lookup")
    todo = beginnings(num, seed=1)
    with file.open("a") as sink:
        for start in range(done, num, 96):
            prompts = todo[start : start + 96]
            for prompt, found in zip(prompts, lm.generate(prompts, max_tokens=256, max_batch=32), strict=True):
                sink.write(json.dumps({"text": prompt + found.text}) + "\n")
            sink.flush()
            typer.echo(f"{min(start + 96, num)} of {num}")
    documents = [text for _, text in corpus.documents(held_out=False)]
    random.Random(5).shuffle(documents)
    size, chosen = 0, []
    for text in documents:
        chosen.append(json.dumps({"text": text}))
        size += len(text)
        if size > characters:
            break
    (out / FILES).write_text("\n".join(chosen) + "\n")


@app.command()
def train(
    out: Out = Path("build/heads"),
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(RUNS)}; default all.")] = None,
) -> None:
    """Train the heads one after the other; a run that is complete is skipped."""
    for name, options in RUNS.items():
        if only not in (None, name):
            continue
        session = prepare(RunFiles("toy", [out / TEXTS, out / FILES]), TrainOptions(**options), out / name)
        session.trainer.on_progress = lambda p: (
            typer.echo(f"{p.iteration}/{p.iterations} {p.metrics}") if p.iteration % 50 == 0 else None
        )
        typer.echo(session.describe())
        session.run()


CARD = """# toy/{name}

An {kind} head of {millions:.2f}M parameters for the toy target, trained by `recipes/demo_heads.py` on text that the
target wrote greedily and on a part of its training files ({tokens:,} tokens in all). Draft vocabulary: {vocabulary}.
Its folder is in the published EAGLE layout: `draftwing export` prepares it for vLLM and SGLang. Apache-2.0.
"""


@app.command()
def export(
    out: Out = Path("build/heads"),
    to: Annotated[Path, typer.Option(help="Folder that gets eagle3/ and eagle1/.")] = TOY,
) -> None:
    """Write the heads in bfloat16, with cards."""
    target = load_target(TOY / "target", prepack=False)
    own = target_id(target, Tokenizer(TOY / "target"), "toy")
    for name, kind in (("eagle3", "EAGLE-3"), ("eagle1", "EAGLE-1")):
        net = read_head(out / name / "head", target.embedding, target.head, own, torch.bfloat16)
        training = json.loads((out / name / "head" / "config.json").read_text())["draftwing"]["training"]
        write_head(to / name, net, training=training)
        card = CARD.format(
            name=name,
            kind=kind,
            millions=sum(p.numel() for p in net.parameters()) / 1e6,
            tokens=training["tokens_in_data"],
            vocabulary=f"{net.config.draft_vocab_size} of {net.config.vocab_size} tokens",
        )
        (to / name / "README.md").write_text(card)
        typer.echo(f"wrote {to / name}")


@app.command()
def statistics(
    of: Annotated[Path, typer.Option(help="Folder with eagle3/ and eagle1/.")] = TOY,
    num: Annotated[int, typer.Option(help="Held-out prompts, none of them among those that come with Draftwing.")] = 40,
) -> None:
    """Collect the heads' held-out statistics (``evaluate.forecast``)."""
    known = set(shipped_prompts(100))
    prompts = [prompt for prompt in corpus.prompts(num + 20, seed=1) if prompt not in known][:num]
    for name in RUNS:
        lm = dw.load("toy", draft=of / name)
        ids = [lm.encode(prompt) for prompt in prompts]
        typer.echo(f"wrote {collect(lm.target, lm.new_drafter, head_id(of / name), ids).write(of / name)}")


if __name__ == "__main__":
    app()
