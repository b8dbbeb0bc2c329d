"""Compare the baseline with transformers' generate and with the memory bandwidth.

    python benchmarks/plain_decoding.py --target src/draftwing/shipped/toy/target --json benchmarks/results/NAME.json

Every round runs all three in turn; the table shows medians. The limit is the bandwidth of a plain sum over as many
freshly written bytes as one token reads weights, measured in the same rounds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

import draftwing as dw
from draftwing.lab.machine import describe_machine, read_bandwidth
from draftwing.loading import load_target
from draftwing.shipped import TOY


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


@torch.inference_mode()
def time_transformers(model: torch.nn.Module, prompt: list[int], tokens: int) -> float:
    """Return tokens per second of ``generate`` after the first token, which includes the prefill."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    began = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    middle = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, **options)
    return (tokens - 1) / (time.perf_counter() - middle - (middle - began))


def time_lean(target: dw.Target, prompt: list[int], tokens: int) -> float:
    engine = dw.Engine(dw.Decoder(target))
    engine.submit(prompt, dw.Sampling(max_tokens=tokens, ignore_eos=True))
    engine.step()
    began = time.perf_counter()
    engine.run()
    return (tokens - 1) / (time.perf_counter() - began)


def random_model(folder: Path) -> Path:
    """Make a Llama of 0.6B parameters with random weights, whose forward takes far longer than overhead."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=20,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def main(
    target: Annotated[Path, typer.Option(help="A Hugging Face folder of a lean family.")] = TOY / "target",
    random: Annotated[bool, typer.Option(help="Instead of --target, a random Llama of 0.6B parameters.")] = False,
    rounds: int = 7,
    tokens: int = 128,
    peer: Annotated[bool, typer.Option(help="Also run transformers.")] = True,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    scratch = tempfile.TemporaryDirectory()
    if random:
        target = random_model(Path(scratch.name) / "random-0.6B")
    lean = load_target(target)
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32, trust_remote_code=False)
    model = load(target).eval() if peer else None
    prompt = [int(i) for i in torch.randint(3, lean.vocab_size, (64,), generator=torch.Generator().manual_seed(0))]
    found: dict[str, list[float]] = {"lean": [], "transformers": [], "limit": []}
    for turn in range(rounds + 1):
        rates = {"lean": time_lean(lean, prompt, tokens)}
        if model is not None:
            rates["transformers"] = time_transformers(model, prompt, tokens)
        rates["limit"] = read_bandwidth(lean.num_weight_bytes) * 1e9 / lean.num_weight_bytes
        for name, rate in rates.items():
            if turn:  # the first round warms up
                found[name].append(rate)
    scratch.cleanup()
    medians = {name: statistics.median(rates) for name, rates in found.items() if rates}
    result = {
        "target": target.name,
        "mb_per_token": round(lean.num_weight_bytes / 1e6, 1),
        "tokens_per_s": {name: round(rate, 1) for name, rate in medians.items()},
        "share_of_limit": round(
            statistics.median(a / b for a, b in zip(found["lean"], found["limit"], strict=True)), 3
        ),
        "rounds": rounds,
        "tokens": tokens,
        "machine": describe_machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }
    if found["transformers"]:
        pairs = zip(found["lean"], found["transformers"], strict=True)
        result["speedup_over_transformers"] = round(statistics.median(a / b for a, b in pairs), 2)
    table = Table("decoder", "tokens/s", "share of limit", title=f"baseline decoding, {target.name}, float32, batch 1")
    for name, rate in medians.items():
        table.add_row(name, f"{rate:.1f}", f"{rate / medians['limit']:.0%}")
    Console().print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
