"""Install PyTorch into the environment that runs this: a CPU build if there is no GPU.

On Linux, plain ``pip install torch`` may bring gigabytes of CUDA libraries to a machine without a GPU. So a dry
run of pip comes first; if it would install CUDA and there is no GPU, uv installs the CPU build, whose index it knows.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

WANTED = "torch==2.13.0"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def have_torch() -> bool:
    return subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def have_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def would_bring_cuda() -> bool:
    command = [*PIP, "install", "--quiet", "--dry-run", "--report", "-", WANTED]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        sys.exit(f"pip cannot install {WANTED}:\n{found.stderr.strip()}\nCheck the network and the Python version.")
    packages = [entry["metadata"]["name"].lower() for entry in json.loads(found.stdout)["install"]]
    return any(name.startswith(("nvidia-", "cuda-", "triton")) for name in packages)


def main() -> None:
    if have_torch():
        return
    if have_gpu() or not would_bring_cuda():
        subprocess.run([*PIP, "install", "--quiet", WANTED], check=True)
        return
    subprocess.run([*PIP, "install", "--quiet", "uv"], check=True)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*uv, "--torch-backend", "cpu", WANTED], check=True)


if __name__ == "__main__":
    main()
