"""Measure the cost of another row: prepacked and int8 linears and ``F.linear`` by number of rows, or GGUF blocks.

    python benchmarks/linear_rows.py --json benchmarks/results/NAME.json
    python benchmarks/linear_rows.py --formats Q4_0,Q4_K,Q8_0 --num-out 1536 --num-in 768

Weights take turns over more memory than the caches hold; the kinds are timed in turn, and medians are shown.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from draftwing.cpu.layout import FORMATS
from draftwing.lab.machine import describe_machine
from draftwing.models.linear import Linear
from draftwing.models.weights import Stored
from plain_decoding import commit

ROWS = (1, 2, 4, 8, 16, 32)
Kinds = dict[str, Callable[[torch.Tensor], object]]


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def make_plain(num_out: int, num_in: int, count: int) -> Kinds:
    """``count`` matrices by oneDNN and PyTorch."""
    plain = [torch.randn(num_out, num_in) for _ in range(count)]
    packed = [Linear(weight.clone()) for weight in plain]
    for linear in packed:
        linear.prepack()
    quantised = [Linear(weight.clone()) for weight in plain]
    for linear in quantised:
        linear.quantize("int8")
    return {
        "prepacked": lambda x: [linear.forward(x) for linear in packed],
        "int8": lambda x: [linear.forward(x) for linear in quantised],
        "F.linear": lambda x: [F.linear(x, weight) for weight in plain],
    }


def make_blocks(names: list[str], num_out: int, num_in: int, count: int) -> Kinds:
    """``count`` random matrices of GGUF formats by the CPU kernel, in both arithmetics."""
    rng, kinds = np.random.default_rng(0), {}
    for name in names:
        kind = FORMATS[name]
        blocks = rng.integers(0, 256, (num_out, num_in // kind.inputs, kind.num_bytes), np.uint8)
        for at in kind.halves:
            blocks[..., at : at + 2] = (
                rng.normal(0, 0.05, blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
            )
        if not kind.halves:
            blocks[..., 0] = rng.integers(119, 126, blocks.shape[:2])
        part = Stored(name, num_in, torch.from_numpy(blocks.reshape(num_out, -1)))
        for arithmetic in ("float32", "int8"):
            linears = [Linear.of_stored([part], None, arithmetic=arithmetic) for _ in range(count)]
            kinds[f"{name}, {arithmetic}"] = lambda x, linears=linears: [linear.forward(x) for linear in linears]
    return kinds


@torch.inference_mode()
def measure(kinds: Kinds, num_in: int, count: int, rounds: int) -> dict[str, dict[int, float]]:
    """Microseconds by kind and number of rows."""
    found: dict[str, dict[int, list[float]]] = {kind: {rows: [] for rows in ROWS} for kind in kinds}
    for turn in range(rounds + 1):
        for rows in ROWS:
            x = torch.randn(rows, num_in)
            for kind, call in kinds.items():
                took = seconds(lambda call=call, x=x: call(x)) / count
                if turn:
                    found[kind][rows].append(took * 1e6)
    return {kind: {rows: statistics.median(times) for rows, times in own.items()} for kind, own in found.items()}


def main(
    num_out: int = 8192,
    num_in: int = 2048,
    rounds: int = 7,
    formats: Annotated[str, typer.Option(help="GGUF formats, with commas between them.")] = "",
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    count = max(3, int(200e6 / (4 * num_out * num_in)))
    names = [name for name in formats.split(",") if name]
    make = make_blocks(names, num_out, num_in, 4 * count) if names else make_plain(num_out, num_in, count)
    found = measure(make, num_in, 4 * count if names else count, rounds)
    title = f"{num_out} x {num_in} float32 ({num_out * num_in * 4 / 1e6:.0f} MB), cost relative to one row"
    table = Table("rows", *map(str, ROWS), title=title)
    relative = {kind: {rows: own[rows] / own[1] for rows in ROWS} for kind, own in found.items()}
    for kind, own in relative.items():
        table.add_row(kind, *(f"{own[rows]:.2f}" for rows in ROWS))
    for kind in found:
        table.add_row(f"{kind}, us", *(f"{found[kind][rows]:.0f}" for rows in ROWS))
    Console().print(table)
    if output is not None:
        result = {
            "matrix": [num_out, num_in],
            "microseconds": found,
            "relative_to_one_row": relative,
            "rounds": rounds,
            "machine": describe_machine(),
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
