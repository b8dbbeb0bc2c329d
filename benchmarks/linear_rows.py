"""Measure the cost of another row: prepacked and int8 linears and ``F.linear`` by number of rows.

    python benchmarks/linear_rows.py --json benchmarks/results/NAME.json

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

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from draftwing.lab.machine import describe_machine
from draftwing.models.linear import Linear
from plain_decoding import commit

ROWS = (1, 2, 4, 8, 16, 32)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@torch.inference_mode()
def measure(num_out: int, num_in: int, rounds: int) -> dict[str, dict[int, float]]:
    """Microseconds by kind and number of rows."""
    count = max(3, int(200e6 / (4 * num_out * num_in)))
    plain = [torch.randn(num_out, num_in) for _ in range(count)]
    packed = [Linear(weight.clone()) for weight in plain]
    for linear in packed:
        linear.prepack()
    quantised = [Linear(weight.clone()) for weight in plain]
    for linear in quantised:
        linear.quantize("int8")
    kinds: dict[str, Callable[[torch.Tensor], object]] = {
        "prepacked": lambda x: [linear.forward(x) for linear in packed],
        "int8": lambda x: [linear.forward(x) for linear in quantised],
        "F.linear": lambda x: [F.linear(x, weight) for weight in plain],
    }
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
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    found = measure(num_out, num_in, rounds)
    title = f"{num_out} x {num_in} float32 ({num_out * num_in * 4 / 1e6:.0f} MB), cost relative to one row"
    table = Table("rows", *map(str, ROWS), title=title)
    relative = {kind: {rows: own[rows] / own[1] for rows in ROWS} for kind, own in found.items()}
    for kind, own in relative.items():
        table.add_row(kind, *(f"{own[rows]:.2f}" for rows in ROWS))
    for kind in ("prepacked", "int8"):
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
