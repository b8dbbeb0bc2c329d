"""The training loop that the recipes share: Muon and AdamW, windows that grow, checkpoints that survive a kill.

Muon (Jordan et al. 2024) updates the matrices, AdamW the embedding and the norms. The learning rate is warm,
flat and then falls to zero, so that ``iterations`` may still be changed on resume while it is flat.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import corpus

TOKENS_PER_ITERATION, FLAT_UNTIL = 6144, 0.45
WINDOWS = ((0.55, 256), (0.9, 512), (1.0, 1024))  # (until this share of the training, window length)
LossOf = Callable[[Tensor, Tensor], Tensor]


def llama(
    vocab_size: int, *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int
) -> LlamaForCausalLM:
    """A new Llama for the demo tokenizer; every layer starts as the identity."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    return model


def load_tokens(out: Path, vocab_size: int) -> tuple[Tokenizer, np.ndarray]:
    """The tokenizer and the training stream, made on the first call and kept in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_file, stream_file = out / "tokenizer.json", out / "train.npy"
    if not stream_file.exists():
        typer.echo("training the tokenizer and encoding the corpus (a minute) ...")
        corpus.train_tokenizer(vocab_size).save(str(tokenizer_file))
        np.save(stream_file, corpus.encode(Tokenizer.from_file(str(tokenizer_file)), held_out=False))
    return Tokenizer.from_file(str(tokenizer_file)), np.load(stream_file)


class Windows:
    """Batches as a function of the tokens consumed alone, so that a resumed run reads what an unbroken one would.

    Each epoch cuts the stream at another phase and in another order; every window starts with BOS.
    """

    def __init__(self, stream: np.ndarray, bos: int) -> None:
        self.stream, self.bos = stream, bos

    def batch(self, consumed: int, num_tokens: int, window: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels, each (num_tokens // window, window)."""
        per_epoch = (len(self.stream) - window) // window
        rows = []
        for k in range(num_tokens // window):
            epoch, place = divmod(consumed // window + k, per_epoch)
            rng = np.random.default_rng((epoch, window))
            phase, order = int(rng.integers(window)), rng.permutation(per_epoch)
            start = phase + int(order[place]) * window
            rows.append(np.concatenate([[self.bos], self.stream[start : start + window]]))
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))
        return ids[:, :-1], ids[:, 1:]


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in named if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(progress: float, iteration: int) -> float:
    falling = (1 - progress) / (1 - FLAT_UNTIL)
    return max(0.02, min((iteration + 1) / 40, 1.0, falling))


def save_atomically(state: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def run(
    model: nn.Module, loss_of: LossOf, windows: Windows, out: Path, iterations: int, every: int, compiled: bool
) -> None:
    """Train, or resume from ``out/checkpoint.pt``. Ctrl-C and SIGTERM write a checkpoint first."""
    device = next(model.parameters()).device
    optims = make_optimizers(model)
    base_rates = [[group["lr"] for group in optim.param_groups] for optim in optims]
    first = consumed = 0
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        first, consumed = state["iteration"], state["consumed"]
        typer.echo(f"resuming at iteration {first}")
    loss_fn = torch.compile(loss_of) if compiled else loss_of
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: stopping.append(which))
    typer.echo(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(windows.stream):,} tokens")
    began, smooth = time.perf_counter(), None
    for iteration in range(first, iterations):
        progress = iteration / iterations
        window = next(length for until, length in WINDOWS if progress < until)
        x, y = windows.batch(consumed, TOKENS_PER_ITERATION, window)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_fn(x.to(device), y.to(device))
        loss.backward()
        for optim, rates in zip(optims, base_rates, strict=True):
            for group, base in zip(optim.param_groups, rates, strict=True):
                group["lr"] = base * rate(progress, iteration)
            optim.step()
            optim.zero_grad()
        consumed += x.numel()
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        done = iteration + 1
        if done % 10 == 0:
            speed = (done - first) * TOKENS_PER_ITERATION / (time.perf_counter() - began)
            left = (iterations - done) * TOKENS_PER_ITERATION / speed / 60
            typer.echo(
                f"{done}/{iterations}  loss {smooth:.3f}  window {window}  {speed:.0f} tok/s  {left:.0f} min left"
            )
            line = {"iteration": done, "loss": round(smooth, 4), "window": window, "tokens_per_s": round(speed)}
            with (out / "metrics.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
        if done % every == 0 or done == iterations or stopping:
            states = [optim.state_dict() for optim in optims]
            state = {"model": model.state_dict(), "optims": states, "iteration": done, "consumed": consumed}
            save_atomically(state, checkpoint)
        if stopping:
            typer.echo(f"stopped at iteration {done}; run the same command again to go on")
            raise typer.Exit(130)
