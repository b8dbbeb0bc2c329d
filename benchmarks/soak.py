"""Soak a server: mixed requests, cancels, bad requests and grammars for a while, then SIGTERM under load.

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --minutes 2 --target MODEL --draft HEAD --clients 8 --json OUT.json

Every completed text must equal the one that the model writes alone and without drafts, at temperature 0 and 1. The
server's memory is read every minute. At the end the server is stopped while each client waits for an answer: all
accepted requests must be answered in full.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

import draftwing as dw
from draftwing.lab.machine import describe_machine
from draftwing.text.prompts import shipped_prompts

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
BAD: list[dict[str, Any]] = [
    {"prompt": "x", "max_tokens": -1},
    {"prompt": ["x", 3]},
    {"prompt": "x", "temperature": "warm"},
    {"prompt": "x" * 200_000},
    {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}},
    {"prompt": "x", "speculation": {"tree": "chain:99999"}},
]


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests of mixed lengths, the same in every run."""
    rng, prompts = random.Random(0), [prompt for prompt in shipped_prompts() if isinstance(prompt, str)]
    found = []
    for number in range(count):
        prompt = " ".join(rng.sample(prompts, rng.choice((1, 1, 1, 3))))[: rng.choice((20, 200, 1500))]
        body: dict[str, Any] = {"prompt": prompt, "seed": number, "temperature": float(number % 2)}
        found.append({**body, "max_tokens": rng.choice((1, 8, 40, 160)), "ignore_eos": True})
    return found


def expect(lm: Any, body: dict[str, Any]) -> str:
    """Return what the model writes without drafts."""
    options = {name: body[name] for name in ("seed", "temperature", "max_tokens", "ignore_eos")}
    text: str = lm.generate(body["prompt"], **options)[0].text
    return text


class Soak:
    def __init__(self, url: str, cases: list[tuple[dict[str, Any], str]]) -> None:
        self.url, self.cases, self.counts = url, cases, Counter[str]()
        self.ends = threading.Event()
        self.problems: list[str] = []

    def work(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=120) as http:
            while not self.ends.is_set():
                try:
                    self.ask(http, rng)
                except httpx.HTTPError as error:
                    self.problems.append(f"{type(error).__name__}: {error}")

    def ask(self, http: httpx.Client, rng: random.Random) -> None:
        kind = rng.choices(("text", "stream", "cancel", "bad", "grammar"), (50, 20, 12, 10, 8))[0]
        body, expected = rng.choice(self.cases)
        self.counts[kind] += 1
        if kind == "bad":
            status = http.post("/v1/completions", json=rng.choice(BAD)).status_code
            if status not in (400, 422):
                self.problems.append(f"a bad request got {status}")
        elif kind == "grammar":
            form = {"type": "json_schema", "json_schema": {"name": "name", "schema": SCHEMA}}
            reply = http.post("/v1/completions", json={"prompt": "{", "max_tokens": 60, "response_format": form})
            if reply.status_code not in (200, 429):
                self.problems.append(f"a grammar got {reply.status_code}: {reply.text[:200]}")
        elif kind == "text":
            reply = http.post("/v1/completions", json=body)
            if reply.status_code == 200:
                self.compare(reply.json()["choices"][0]["text"], expected, body)
            elif reply.status_code != 429:
                self.problems.append(f"a text got {reply.status_code}: {reply.text[:200]}")
        else:
            self.stream(http, body, expected, most=rng.randint(1, 6) if kind == "cancel" else None)

    def stream(self, http: httpx.Client, body: dict[str, Any], expected: str, most: int | None) -> None:
        text, chunks = "", 0
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                text += "".join(choice["text"] for choice in chunk.get("choices", ()))
                chunks += 1
                if most is not None and chunks >= most:
                    break
        if most is None and reply.status_code == 200:
            self.compare(text, expected, body)
        elif not expected.startswith(text):
            self.problems.append(f"the start of a text differs: {text!r} of {expected!r}")

    def compare(self, text: str, expected: str, body: dict[str, Any]) -> None:
        if text != expected:
            self.problems.append(f"a text differs (seed {body['seed']}): {text!r}, expected {expected!r}")


def memory(process: int) -> float:
    """Return the resident memory in MB."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def stop(server: subprocess.Popen[bytes], soak: Soak, clients: int) -> list[str]:
    """End the server while each client waits for a text; return what was lost."""
    lost, started = [], threading.Barrier(clients + 1)

    def wait(number: int) -> None:
        body, expected = soak.cases[number]
        with httpx.Client(base_url=soak.url, timeout=120) as http:
            text = ""
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
                started.wait()  # its head has come, so it was accepted
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))
            if text != expected:
                lost.append(f"request {number}: {text!r}, expected {expected!r}")

    waiting = [threading.Thread(target=wait, args=(number,)) for number in range(clients)]
    for thread in waiting:
        thread.start()
    started.wait()
    server.send_signal(signal.SIGTERM)
    for thread in waiting:
        thread.join()
    return lost if server.wait(60) == 0 else [*lost, f"the server ended with {server.returncode}"]


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 30.0,
    target: Annotated[str, typer.Option(help="The model.")] = "toy",
    draft: Annotated[str, typer.Option(help="Its draft.")] = "eagle3",
    clients: Annotated[int, typer.Option(help="Concurrent clients.")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Soak a server, and exit with 1 if anything went wrong."""
    print("writing the expected texts ...", flush=True)
    lm = dw.load(target, "none")
    cases = [(body, expect(lm, body)) for body in bodies(40)]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "draftwing", "serve", "--port", str(port)]
    # GiB of keys and values that are full after some minutes: until then memory grows, as finished texts stay.
    kv_memory = "0.05"
    server = subprocess.Popen(
        [*command, "--target", target, "--draft", draft, "--kv-memory", kv_memory, "--max-waiting", "256"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    soak = Soak(f"http://127.0.0.1:{port}", cases)
    while server.poll() is None:
        try:
            httpx.get(f"{soak.url}/health").raise_for_status()
            break
        except httpx.TransportError:
            time.sleep(0.2)
    else:
        raise SystemExit(f"the server ended with {server.returncode}: run {' '.join(command)}")
    threads = [threading.Thread(target=soak.work, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    start, sizes = time.monotonic(), [memory(server.pid)]
    while (left := 60 * minutes - (time.monotonic() - start)) > 0:
        time.sleep(min(60, left))
        sizes.append(memory(server.pid))
        print(
            f"{len(sizes) - 1} min: {sizes[-1]:.0f} MB, {soak.counts.total()} requests, {len(soak.problems)} problems"
        )
        sys.stdout.flush()
    soak.ends.set()
    for thread in threads:
        thread.join()
    lost = stop(server, soak, clients)
    later = sizes[len(sizes) // 3 :]
    growth = later[-1] - later[0]
    print(
        f"{describe_machine()['cpu']}: {dict(soak.counts)}; from a third of the time on memory grew by {growth:.0f} MB"
    )
    for problem in (*soak.problems[:10], *lost):
        print(problem)
    print(f"{len(soak.problems)} problems, {len(lost)} requests lost at SIGTERM")
    if json_path is not None:
        report = {"counts": soak.counts, "memory_mb": sizes, "problems": soak.problems, "lost": lost}
        json_path.write_text(json.dumps({"machine": describe_machine(), **report}, indent=1))
    raise typer.Exit(1 if soak.problems or lost else 0)


if __name__ == "__main__":
    typer.run(main)
