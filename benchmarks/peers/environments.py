"""A virtual environment for each peer under ``build/peers``, made at first use and then kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from peers.channel import PeerError

ROOT = Path(__file__).resolve().parents[2]

# Peer: what pip shall install. Draftwing and transformers share this repository's
# own environment, and so the same PyTorch. vLLM is installed by ``vllm_handover.py``, which knows how.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "openvino": (
        "openvino-genai==2026.4.1.0",
        "nncf==3.4.0",
        "transformers>=5.5,<5.6",
        "huggingface-hub<1.22",
        "requests>=2.33",
        # Its EAGLE-3 net stands in a file that imports these.
        "diffusers",
        "einops",
    ),
    "llama.cpp": ("cmake", "ninja", "gguf==0.19.0"),
}
# llama.cpp itself is not on the package index, but this package contains its source.
LLAMA_CPP = "llama-cpp-python==0.3.36"
WITH_TORCH = ("openvino",)
# These ask for torchvision, which would bring another PyTorch with gigabytes of CUDA, and which text does not need.
WITHOUT_DEPENDENCIES = {"openvino": ("optimum-intel==2.2.0", "optimum==2.3.0")}
OWN = ("draftwing", "transformers")
TORCH_VERSION = "from importlib.metadata import version; print(version('torch').partition('+')[0])"
LAST_WORDS = 4  # lines of a failed command


def told_by(*command: str) -> str:
    """Return the output of a command.

    Raises:
        PeerError: it failed; with the end of its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise PeerError(f"cannot be installed: {' | '.join(lines[-LAST_WORDS:])[-600:]}")
    return done.stdout.strip()


def python_of(peer: str, folder: Path, say: Callable[[str], None]) -> Path:
    """Return the Python of a peer's environment, which is made first if it is not complete.

    Raises:
        PeerError: it cannot be made.
    """
    if peer in OWN:
        return Path(sys.executable)
    env = folder / peer
    python, ready = env / "bin" / "python", env / ".ready"
    wanted = "\n".join((*REQUIREMENTS.get(peer, ()), *WITHOUT_DEPENDENCIES.get(peer, ())))
    if peer == "llama.cpp":
        wanted += f"\n{LLAMA_CPP} {os.environ.get('CMAKE_ARGS', '')}"
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    say(f"setting up {env} (once, minutes) ...")
    if peer == "vllm":
        told_by(sys.executable, str(ROOT / "benchmarks" / "vllm_handover.py"), "--setup", "--env", str(env))
    else:
        _install(peer, env)
    if peer == "llama.cpp":
        _build_llama_cpp(env)
    ready.write_text(wanted, encoding="utf-8")
    return python


def _install(peer: str, env: Path) -> None:
    python = str(env / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    if not Path(python).exists():
        told_by(sys.executable, "-m", "venv", str(env))
    packages = REQUIREMENTS[peer]
    if peer in WITH_TORCH:
        told_by(python, str(ROOT / "tools" / "install_torch.py"))
        # The same version said again, so that nothing replaces the CPU build.
        packages = (f"torch=={told_by(python, '-c', TORCH_VERSION)}", *packages)
    for package in WITHOUT_DEPENDENCIES.get(peer, ()):
        told_by(*pip, "--no-deps", package)
    told_by(*pip, *packages)


def _build_llama_cpp(env: Path) -> None:
    """Build llama.cpp's server for this processor; the environment variable CMAKE_ARGS adds options."""
    build, bin_ = env / "build", env / "bin"
    shutil.rmtree(build, ignore_errors=True)
    pip = (str(bin_ / "python"), "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
    told_by(*pip, "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(build), LLAMA_CPP)
    with tarfile.open(next(build.glob("*.tar.gz"))) as packed:
        packed.extractall(build, filter="data")
    source = next(build.glob("llama_cpp_python-*/vendor/llama.cpp"))
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
    ]
    own = os.environ.get("CMAKE_ARGS", "").split()
    told_by(
        *(str(bin_ / "cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={bin_ / 'ninja'}"),
        *("-S", str(source), "-B", str(build), *options, *own),
    )
    told_by(str(bin_ / "cmake"), "--build", str(build), "--target", "llama-server")
    (build / "source").write_text(" ".join((LLAMA_CPP, *own)), encoding="utf-8")
