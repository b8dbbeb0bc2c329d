"""The worker of llama.cpp: its server, built from the source that llama-cpp-python contains."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.channel import PeerError, Run

CONTEXT = 2048
LOAD_SECONDS = 300
DRAFTS = {"lookup": "ngram-simple", "eagle3": "draft-eagle3"}
# Its lookup wants 12 equal tokens by default and then drafts 48: too rare in chats, and too many.
LOOKUP = ("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m")


class LlamaCpp:
    """GGUF in float32 with a float32 cache; Q8_0 and given files with llama.cpp's default float16 cache."""

    def prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        from peers.gguf_file import write_gguf

        if job["precision"] == "gguf":
            return {"model": str((Path(job["target"]) / "model.gguf").resolve())}
        file = Path(job["cache"]) / ("Q8_0.gguf" if job["precision"] == "int8" else "F32.gguf")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_gguf(Path(job["target"]), file, job["precision"])
        return {"model": str(file)}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, threads, drafted = f"http://127.0.0.1:{port}", str(job["threads"]), str(job["draft_tokens"])
        command = [str(Path(sys.prefix) / "build" / "bin" / "llama-server"), "--model", job["model"]]
        command += ["--port", str(port), "--ctx-size", str(CONTEXT), "--parallel", "1"]
        command += ["--threads", threads, "--threads-batch", threads]
        if job["precision"] == "fp32":
            command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        if job["mode"] in DRAFTS:
            command += ["--spec-type", DRAFTS[job["mode"]], "--spec-draft-n-max", drafted]
        if job["mode"] == "lookup":
            command += [*LOOKUP, drafted]
        if job["draft"] is not None:
            command += ["--model-draft", str(Path(job["draft"]) / "head.gguf")]
        self.server = subprocess.Popen(command, stdout=sys.stderr)
        until = time.monotonic() + LOAD_SECONDS
        while not self._ready():
            if self.server.poll() is not None or time.monotonic() > until:
                raise PeerError(f"llama-server did not load the model (exit code {self.server.poll()})")
            time.sleep(0.1)
        built = (Path(sys.prefix) / "build" / "source").read_text(encoding="utf-8").strip()
        return {"versions": {"llama.cpp": built, "gguf": version("gguf")}}

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def generate(self, prompt: list[int], max_tokens: int) -> Run:
        asked = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,  # or a prompt that it has seen would cost nothing
            "return_tokens": True,
        }
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        clock = found["timings"]  # the first token counts as prefill
        prefill, decoding = clock["prompt_ms"] / 1e3, clock["predicted_ms"] / 1e3
        forwards = max_tokens - 1 - clock.get("draft_n_accepted", 0)
        return Run(found["tokens"], prefill + decoding, prefill, 1, forwards)


PEER = LlamaCpp()
