"""A tiny target with a tokenizer, and short trainings of heads for it through the ordinary session."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from conftest import TEXTS, add_tokenizer, build
from draftwing.methods.eagle import initialise
from draftwing.methods.eagle_net import EagleConfig, EagleNet
from draftwing.train.options import TrainOptions
from draftwing.train.session import RunFiles, Session, prepare
from draftwing.train.trainer import Trainer


def new_target(folder: Path, family: str = "llama") -> Path:
    """Write a target whose vocabulary has room for the tokenizer's tokens."""
    build(family, head_dim=32, vocab_size=300, initializer_range=0.1).float().save_pretrained(folder)
    return add_tokenizer(folder)


def short_run(target: Path, folder: Path, method: str, **changes) -> tuple[Path, Session, list[dict]]:
    """Train a head: the run's folder, its session, and its metrics."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in TEXTS * 6))
    options = {
        "iterations": 8, "lr": 3e-3, "max_length": 32, "tokens_per_batch": 256, "precision": "no",
        "validation_share": 0.2, "eval_prompts": 1, "eval_tokens": 4,
    }  # fmt: skip
    session = prepare(
        RunFiles(target, [data]), TrainOptions(method, **{**options, **changes}), folder, dtype="float32", device="cpu"
    )
    session.run()
    return folder, session, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def three_updates(method: str, target, source, out: Path, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train an EAGLE net on a source of features: its weights and the losses."""
    options = TrainOptions(
        method=method, iterations=3, precision="no", max_length=max_length, unroll_steps=2, save_every=9, eval_every=9
    )
    torch.manual_seed(0)
    net = EagleNet(EagleConfig.for_target(3 if method == "eagle3" else 1, target.config), target.embedding, target.head)
    initialise(net, target.head, [source.batch(0)])
    losses = []
    trainer = Trainer(net, target.head, net.target_ids, source, options, out)
    trainer.on_progress = lambda progress: losses.append(progress.metrics["loss"])
    trainer.run()
    return torch.cat([p.detach().flatten() for p in net.parameters() if p.requires_grad]), torch.tensor(losses)
