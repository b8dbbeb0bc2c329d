"""Run every stage of docs/dev/gpu.md on a CPU, with the small models that the tests use: minutes.

python benchmarks/gpu/rehearse.py
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from draftwing.shipped import SHIPPED, TOY

HERE = Path(__file__).parent
RECIPE = str(HERE.parents[1] / "recipes" / "chat_heads.py")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        out, target = ["--out", name], ["--target", str(TOY / "target")]
        stages = {
            "check": [str(HERE / "check.py"), "--tokens", "16", "--prompts", "3", "--batches", "3"],
            "speed": [str(HERE / "speed.py"), str(TOY / "target"), "--batches", "1,2", "--chains", "2", "--rounds", "1",
                      "--tokens", "16", "--no-peer", "--copied-mb", "50"],
            "answers": [RECIPE, "answers", *out, *target, "--prompts", str(SHIPPED / "prompts.jsonl"),
                        "--max-tokens", "16", "--processes", "2"],
            "train": [RECIPE, "train", *out, *target, "--only", "eagle3", "--minutes", "0.1"],
        }  # fmt: skip
        for stage, command in stages.items():
            began = time.perf_counter()
            words = [*command, "--device", "cpu"]
            print(f"== {stage}: python {shlex.join(words)}", flush=True)
            subprocess.run([sys.executable, *words], check=True)
            print(f"== {stage}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
