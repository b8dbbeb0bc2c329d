"""Compare the time and peak memory of loading a model with those of transformers.

    python benchmarks/load_time.py --target path-or-gguf --json benchmarks/results/NAME.json

Each load runs in a new process, in turn, with the file in the page cache. Seconds are those of the call that loads;
memory is the process's peak, less its memory after imports. transformers loads in float32, in which Draftwing
computes, and in the checkpoint's own type; there it maps the file and reads it at the first forward, which is measured
too: ``to first token`` is load and a forward of one token.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from plain_decoding import commit

WAYS = ("draftwing", "transformers float32", "transformers own")


def peak_mb() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, folder: Path) -> dict[str, float]:
    """Measure in one process."""
    import torch

    if way == "draftwing":
        from draftwing.cpu.library import get_kernel
        from draftwing.decode import Decoder
        from draftwing.models.lean import LeanTarget
        from draftwing.sampling import Sampling

        get_kernel()
    else:
        import transformers
        from transformers import AutoModelForCausalLM

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    before, began = peak_mb(), time.perf_counter()
    if way == "draftwing":
        target = LeanTarget.from_folder(folder)
        seconds, peak = time.perf_counter() - began, peak_mb() - before
        decoder = Decoder(target)
        decoder.admit([1, 2], Sampling(max_tokens=1, ignore_eos=True))
        decoder.step()
    else:
        dtype = torch.float32 if way.endswith("float32") else "auto"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        seconds, peak = time.perf_counter() - began, peak_mb() - before
        with torch.no_grad():
            model(torch.tensor([[1, 2]]))
    return {
        "seconds": seconds,
        "to_first_token": time.perf_counter() - began,
        "peak_mb": peak,
        "peak_mb_with_first_token": peak_mb() - before,
    }


def main(
    target: Annotated[str, typer.Option(help="A folder or GGUF file of a lean family.")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    peers: Annotated[bool, typer.Option(help="Measure transformers too.")] = True,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure loading."""
    from draftwing.lab.machine import describe_machine
    from draftwing.models.resolve import resolve

    folder = resolve(target)
    size = sum(file.stat().st_size for pattern in ("*.safetensors", "*.gguf") for file in folder.glob(pattern)) / 2**20
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds + 1):
        for way in WAYS if peers else WAYS[:1]:
            command = [sys.executable, __file__, "--worker", way, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise typer.BadParameter(f"{way}: {done.stderr.strip()[-400:]}")
            if turn:  # the first brings the file into memory
                found.setdefault(way, []).append(json.loads(done.stdout.strip().split("\n")[-1]))
    rows: dict[str, dict[str, Any]] = {
        way: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for way, runs in found.items()
    }
    table = Table("load", "seconds", "to first token", "peak MB", "peak / file", title=f"{target}: {size:.0f} MB")
    for way, row in rows.items():
        row["peak_over_file"] = row["peak_mb"] / size
        figures = f"{row['seconds']:.2f}", f"{row['to_first_token']:.2f}", f"{row['peak_mb']:.0f}"
        table.add_row(way, *figures, f"{row['peak_over_file']:.2f}")
    Console().print(table)
    if output is not None:
        about = {"target": Path(target).name, "file_mb": size, "rounds": rounds, "machine": describe_machine()}
        about |= {"date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        output.write_text(json.dumps({**about, "loads": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]))))
    else:
        typer.run(main)
