"""Measure a server under load, and whether automatic speculation ever slows it down.

    python benchmarks/load.py --target smollm2-135m-instruct --quantize int8 --prompts mt_bench.jsonl --json OUT.json
    python benchmarks/load.py --target MODEL --draft HEAD --clients 1,4,16 --mode auto --mode chain:3 --mode none
    python benchmarks/load.py --target MODEL --rates 0.5,1,2 --json OUT.json           # requests a second (Poisson)
    python benchmarks/load.py --url http://localhost:8000 --model NAME --mode plain    # vLLM, llama.cpp, any server
    python benchmarks/load.py --target MODEL --peer llama.cpp=http://localhost:8080 --peer vllm=http://localhost:8000

One Draftwing server serves all modes, since each request names its mode. A level is a number of clients, each of which
sends its next request when it has the last answer, or a rate at which requests arrive. In every round each mode, and
each ``--peer`` that is already running, gets the same requests, and the order rotates by one; figures are medians over
rounds, ratios are medians of the ratios within rounds. Texts must be the same in all modes; for a peer, their number is
reported. Requests to a peer, and with ``--mode plain``, use no extension of Draftwing.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from draftwing.lab.machine import describe_machine
from draftwing.text.prompts import read_prompts, shipped_prompts
from plain_decoding import commit
from sweep import numbers

STARTS = 180.0  # seconds that a server may take to be ready
ALLOWED = 0.97  # automatic speculation over the better of the other modes


@dataclass
class Answer:
    """One request as its client saw it: seconds from when it was sent, or meant to be."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    whole: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between pieces of text
    error: str = ""


@dataclass(frozen=True)
class Job:
    """The request of a client."""

    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    seed: int

    def body(self, model: str, mode: str) -> dict[str, Any]:
        """As JSON. ``mode``: a tree, ``none``, ``auto``, or ``plain`` for a server of another kind."""
        body: dict[str, Any] = {
            "model": model, "messages": self.messages, "max_tokens": self.max_tokens, "temperature": self.temperature,
            "seed": self.seed, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        if mode != "plain":
            body["speculation"] = {"draft": "none"} if mode == "none" else {"tree": mode}
        return body


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], since: float | None = None) -> Answer:
    """Send one request and read its stream."""
    answer, began = Answer(), time.perf_counter() if since is None else since
    latest = 0.0
    try:
        async with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
                text = "".join(each["delta"].get("content") or "" for each in event["choices"])
                if not text:
                    continue
                now = time.perf_counter()
                if latest:
                    answer.gaps.append(now - latest)
                latest, answer.first = now, answer.first or now - began
                answer.text += text
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__} {error}"
    answer.whole = time.perf_counter() - began
    return answer


async def closed_loop(
    client: httpx.AsyncClient, url: str, bodies: Sequence[dict[str, Any]], num_clients: int
) -> list[Answer]:
    """Run a number of clients, each with one request at a time."""
    waiting, found = iter(enumerate(bodies)), {}

    async def work() -> None:
        for place, body in waiting:
            found[place] = await ask(client, url, body)

    await asyncio.gather(*(work() for _ in range(num_clients)))
    return [found[place] for place in range(len(bodies))]


async def poisson(
    client: httpx.AsyncClient, url: str, bodies: Sequence[dict[str, Any]], rate: float, seed: int
) -> list[Answer]:
    """Send requests at random times (Poisson), at a mean rate per second."""
    rng, at, began, tasks = random.Random(seed), 0.0, time.perf_counter(), []
    for body in bodies:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(client, url, body, began + at)))  # even if this client is late
        at += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Return the figures of one round of one mode."""
    gaps = sorted(gap for each in answers for gap in each.gaps) or [0.0]
    firsts = sorted(each.first for each in answers)
    return {
        "tokens_per_s": sum(each.tokens for each in answers) / seconds,
        "ttft_p50": statistics.median(firsts),
        "ttft_p99": firsts[int(0.99 * (len(firsts) - 1))],
        "gap_p50": statistics.median(gaps),
        "gap_p99": gaps[int(0.99 * (len(gaps) - 1))],
        "per_token": statistics.median((each.whole - each.first) / max(each.tokens - 1, 1) for each in answers),
        "latency_p50": statistics.median(each.whole for each in answers),
    }


@dataclass(frozen=True)
class Asked:
    """A mode on a server. ``model``: its name there."""

    name: str
    mode: str
    url: str
    model: str
    is_peer: bool = False


def peer_of(said: str, model: str) -> Asked:
    """``NAME=URL``; its model is the first one it names itself."""
    name, _, url = said.partition("=")
    if not name or not url.startswith("http"):
        raise typer.BadParameter(f"{said!r} is no NAME=URL, such as vllm=http://localhost:8000", param_hint="--peer")
    with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):  # else as ours is called
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return Asked(name, "plain", url.rstrip("/"), model, is_peer=True)


async def measure(jobs: Sequence[Job], compared: Sequence[Asked], level: dict[str, float]) -> Any:
    """All rounds of one level: by name a list of figures, and the texts of the first one."""
    rounds, found, texts = int(level["rounds"]), {each.name: [] for each in compared}, {}
    # A connection for each request: one that has waited for its turn may be closed by its server in this very moment.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        for turn in range(-1, rounds):  # the first one warms up
            for place in range(len(compared)):
                asked = compared[(place + turn) % len(compared)]
                url, mode = f"{asked.url}/v1/chat/completions", asked.name
                bodies = [job.body(asked.model, asked.mode) for job in jobs]
                began = time.perf_counter()
                if "rate" in level:
                    answers = await poisson(client, url, bodies, level["rate"], turn)
                else:
                    answers = await closed_loop(client, url, bodies, int(level["clients"]))
                wrong = next((each.error for each in answers if each.error), "")
                if wrong:
                    raise SystemExit(f"{mode}, {level}: {wrong}")
                texts.setdefault(mode, [each.text for each in answers])
                if turn >= 0:
                    found[mode].append(figures(answers, time.perf_counter() - began))
    return found, texts


@contextmanager
def served(target: str | None, draft: str | None, quantize: str | None, rows: int) -> Iterator[str]:
    """A server of ours, and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "draftwing", "serve", "--port", str(port), "--name", "model"]
    command += ["--max-batch", str(rows), "--max-waiting", "1000"]
    for name, value in (("--target", target), ("--draft", draft), ("--quantize", quantize)):
        command += [name, value] if value else []
    process, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    try:
        for _ in range(int(STARTS * 4)):
            time.sleep(0.25)
            if process.poll() is not None:
                raise SystemExit("the server ended before it was ready")
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def summary(
    found: dict[str, list[dict[str, float]]], texts: dict[str, list[str]], peers: Sequence[str]
) -> dict[str, Any]:
    """Medians, and auto against the better of our other modes, round by round."""
    medians = {
        mode: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        for mode, rounds in found.items()
    }
    first, ours = next(iter(texts.values())), [mode for mode in found if mode not in peers]
    equal = {mode: sum(map(str.__eq__, first, each)) for mode, each in texts.items()}
    line: dict[str, Any] = {"modes": medians, "rounds": found, "num_texts": len(first), "equal_texts": equal}
    line["identical"] = all(equal[mode] == len(first) for mode in ours)
    others = [found[mode] for mode in ours if mode != "auto"]
    if "auto" in found and others:
        best = [max(each["tokens_per_s"] for each in turn) for turn in zip(*others, strict=True)]
        ratios = [own["tokens_per_s"] / top for own, top in zip(found["auto"], best, strict=True)]
        line["auto_over_best_other"] = statistics.median(ratios)
    return line


def show(name: str, line: dict[str, Any], table: Table) -> None:
    """A level's rows of the table."""
    for mode, each in line["modes"].items():
        ratio = line.get("auto_over_best_other", 0.0) if mode == "auto" else 0.0
        times = (f"{1e3 * each[key]:.0f}" for key in ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99", "per_token"))
        told = "" if not ratio else f"{ratio:.2f}{'' if ratio >= ALLOWED else ' (below 0.97)'}"
        equal, count = line["equal_texts"][mode], line["num_texts"]
        same = "yes" if equal == count else f"{equal} of {count}"
        table.add_row(name, mode, f"{each['tokens_per_s']:.0f}", *times, told, same)


def main(
    target: Annotated[str | None, typer.Option(help="Served by us; the shipped one unless given.")] = None,
    draft: Annotated[str | None, typer.Option(help="As in draftwing serve.")] = None,
    quantize: Annotated[str | None, typer.Option()] = None,
    url: Annotated[str | None, typer.Option(help="A running server to measure instead.")] = None,
    model: Annotated[str, typer.Option(help="The model's name there.")] = "model",
    prompts: Annotated[Path | None, typer.Option(help="Questions. [default: the shipped prompts]")] = None,
    clients: Annotated[str, typer.Option(help="Closed loops: numbers of clients.")] = "1,2,4,8,16,32",
    rates: Annotated[str, typer.Option(help="Open loops: requests per second.")] = "",
    mode: Annotated[
        list[str] | None, typer.Option(help="auto, none, a tree, or plain. [default: auto, chain:3, none]")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Per round; at least two for each client.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    peer: Annotated[list[str] | None, typer.Option(help="NAME=URL of another server. Repeatable.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-T", min=0.0)] = 0.0,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure every level and print a table."""
    console, modes = Console(), mode or ["auto", "chain:3", "none"]
    levels = [{"clients": each} for each in numbers(clients, int)] + [{"rate": each} for each in numbers(rates, float)]
    most = max([int(each.get("clients", 16)) for each in levels])
    given = list(read_prompts(prompts) if prompts else shipped_prompts())
    table = Table("level", "mode", "tokens/s", "ttft p50", "p99", "gap p50", "p99", "ms a token", "auto / best", "same")
    found: dict[str, Any] = {}
    with served(target, draft, quantize, most) if url is None else _there(url) as where:
        compared = [Asked(mode, mode, where, model) for mode in modes]
        compared += [peer_of(each, model) for each in peer or []]
        peers = [each.name for each in compared if each.is_peer]
        for level in levels:
            count = max(requests, 2 * int(level.get("clients", 0)))
            jobs = [Job(_messages(given[place % len(given)]), max_tokens, temperature, place) for place in range(count)]
            name = f"{level['clients']} clients" if "clients" in level else f"{level['rate']:g}/s"
            found[name] = summary(*asyncio.run(measure(jobs, compared, {**level, "rounds": rounds})), peers)
            show(name, found[name], table)
            told = {mode: round(each["tokens_per_s"], 1) for mode, each in found[name]["modes"].items()}
            console.print(f"{name}: {told}, same {found[name]['identical']}", soft_wrap=True)
    console.print(table)
    if output is not None:
        settings = {
            "target": target or "shipped", "draft": draft, "quantize": quantize, "max_tokens": max_tokens,
            "temperature": temperature, "rounds": rounds, "other_server": url is not None,
            "prompts": prompts and prompts.name, "peers": peers,
        }  # fmt: skip
        where_and_when = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat()}
        result = {"levels": found, "settings": settings, **where_and_when, "commit": commit()}
        output.write_text(json.dumps(result, indent=1) + "\n")


def _messages(prompt: Any) -> list[dict[str, str]]:
    """The first question, as a dialogue."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [each for each in prompt if each["role"] in ("system", "user")][:1]


@contextmanager
def _there(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    typer.run(main)
