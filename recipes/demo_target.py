"""Train the shipped target: a Llama of 20M parameters that writes Python, from the standard library's source.

    python recipes/demo_target.py train  --out build/target            # resumes where it was stopped
    python recipes/demo_target.py report --out build/target            # held-out bits per byte
    python recipes/demo_target.py export --out build/target --to src/draftwing/shipped/target

Deep and narrow on purpose: a draft of one layer is then cheap beside it. Matrices are updated by Muon, the
rest by AdamW; the learning rate is warm, flat and then falls to zero (so that ``--iterations`` may still be
changed on resume while it is flat). The window grows while training: short ones are cheaper per token.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import corpus

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

VOCAB, TOKENS_PER_ITERATION, FLAT_UNTIL = 8192, 6144, 0.45
WINDOWS = ((0.55, 256), (0.9, 512), (1.0, 1024))  # (until this share of the training, window length)
Out = Annotated[Path, typer.Option(help="Folder of the run: tokenizer, tokens, checkpoint, metrics.")]


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=384,
        intermediate_size=896,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
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
            torch.nn.init.zeros_(weight)  # every layer starts as the identity
    return model


def load_tokens(out: Path) -> tuple[Tokenizer, np.ndarray]:
    """The tokenizer and the training stream, made on the first call and kept in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_file, stream_file = out / "tokenizer.json", out / "train.npy"
    if not stream_file.exists():
        typer.echo("training the tokenizer and encoding the corpus (a minute) ...")
        corpus.train_tokenizer(VOCAB).save(str(tokenizer_file))
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


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
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


@app.command()
def train(
    out: Out = Path("build/target"),
    iterations: Annotated[int, typer.Option(help="Training updates; may be changed on resume.")] = 1100,
    every: Annotated[int, typer.Option(help="Iterations between two checkpoints.")] = 50,
    device: Annotated[str, typer.Option()] = "cuda" if torch.cuda.is_available() else "cpu",
    compiled: Annotated[bool, typer.Option(help="torch.compile the loss (1.3x on a CPU).")] = True,
) -> None:
    """Train, or resume. Ctrl-C writes a checkpoint first; kill -9 loses at most --every iterations."""
    tokenizer, stream = load_tokens(out)
    windows = Windows(stream, tokenizer.token_to_id(corpus.BOS))
    model = build_model().to(device)
    optims = optimizers(model)
    base_rates = [[g["lr"] for g in o.param_groups] for o in optims]
    first = consumed = 0
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        first, consumed = state["iteration"], state["consumed"]
        typer.echo(f"resuming at iteration {first}")

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        hidden = model.model(input_ids=x, use_cache=False).last_hidden_state
        return F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), y.flatten())

    loss_fn = torch.compile(loss_of) if compiled else loss_of
    stopping: list[int] = []
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda number, _: stopping.append(number))
    typer.echo(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {len(stream):,} training tokens")
    began, smooth = time.perf_counter(), None
    for iteration in range(first, iterations):
        progress = iteration / iterations
        window = next(length for until, length in WINDOWS if progress < until)
        x, y = windows.batch(consumed, TOKENS_PER_ITERATION, window)
        with torch.autocast(device, torch.bfloat16):
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
            line = {"iteration": done, "loss": round(smooth, 4), "window": window, "tokens_per_s": round(speed)}
            typer.echo(
                f"{done}/{iterations}  loss {smooth:.3f}  window {window}  {speed:.0f} tok/s  {left:.0f} min left"
            )
            with (out / "metrics.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
        if done % every == 0 or done == iterations or stopping:
            optim_states = [o.state_dict() for o in optims]
            state = {"model": model.state_dict(), "optims": optim_states, "iteration": done, "consumed": consumed}
            save_atomically(state, checkpoint)
        if stopping:
            typer.echo(f"stopped at iteration {done}; run the same command again to go on")
            raise typer.Exit(130)


def trained(out: Path) -> LlamaForCausalLM:
    model = build_model()
    model.load_state_dict(torch.load(out / "checkpoint.pt", map_location="cpu")["model"])
    return model.eval()


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer, window: int = 1024) -> dict[str, float]:
    """Held-out loss over whole files, in windows that share half their tokens so that each has a context."""
    nats = num_tokens = num_bytes = 0.0
    for _, text in corpus.documents(held_out=True):
        ids = torch.tensor([tokenizer.encode(text).ids])
        num_bytes += len(text.encode())
        num_tokens += ids.shape[1] - 1
        for start in range(0, max(ids.shape[1] - 1 - window // 2, 1), window // 2):
            piece = ids[:, start : start + window + 1]
            fresh = 0 if start == 0 else window // 2
            logits = model(piece[:, :-1]).logits[:, fresh:]
            nats += F.cross_entropy(logits.flatten(0, 1), piece[:, 1 + fresh :].flatten(), reduction="sum").item()
    return {
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "nats_per_token": nats / num_tokens,
        "bytes_per_token": num_bytes / num_tokens,
    }


@app.command()
def report(out: Out = Path("build/target")) -> None:
    """Held-out bits per byte of the checkpoint as it stands."""
    tokenizer, _ = load_tokens(out)
    result = bits_per_byte(trained(out), tokenizer)
    (out / "report.json").write_text(json.dumps(result, indent=2) + "\n")
    typer.echo(json.dumps(result, indent=2))


if __name__ == "__main__":
    app()
