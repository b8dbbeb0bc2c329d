"""Compare speculative decoding with the baseline and with transformers on a GPU, at batch 1 to 64.

    python benchmarks/inflate.py /tmp/inflated-8b --like 8b --dtype bfloat16 --no-check
    python benchmarks/gpu/speed.py /tmp/inflated-8b/target --json NAME.json --png NAME.png

Every round runs all methods in turn; the table shows medians. A batch is timed from its second step until its first row
ends, so that it is full all the time. The first two rounds, which record most graphs, are not counted. The limit of the
baseline is the measured bandwidth of copying memory over the weights' bytes. ``--device cpu`` tests the script.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

import draftwing as dw
from draftwing.cli import screen as console
from draftwing.errors import ConfigError, DraftwingError
from draftwing.lab.machine import describe_machine
from draftwing.loading import DTYPES, load_drafter
from draftwing.shipped import SHIPPED
from draftwing.text.prompts import read_prompts, shipped_prompts

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WARM_UPS = 2  # rounds
Prompts = list[list[int]]
# Tokens per second of all rows together, tau, and milliseconds of a step in which the device has nothing to do.
Measure = Callable[[Prompts], tuple[float, float, float]]


@dataclass(frozen=True)
class Result:
    """One method at one batch size: medians over the rounds.

    Attributes:
        speedup: over our baseline decoding of the same round, and ``efficiency`` that over tau.
        share: of the copy bandwidth that reading the weights once for each forward takes.
        host_ms: of a step, in which the device has nothing to do.
    """

    way: str
    batch: int
    tokens_per_s: float
    speedup: float
    tau: float
    efficiency: float
    share: float
    host_ms: float


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 9) -> float:
    """Return the median GB/s of copying that many bytes, counting reads and writes."""
    source = torch.ones(num_bytes // 4, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(repeats + 1):
        wait(device)
        began = time.perf_counter()
        target.copy_(source)
        wait(device)
        seconds.append(time.perf_counter() - began)
    return 8 * source.numel() / statistics.median(seconds[1:]) / 1e9


def ours(lm: dw.LM, tokens: int, temperature: float) -> Measure:
    def measure(prompts: Prompts) -> tuple[float, float, float]:
        engine, stats = dw.Engine(lm.decoder()), dw.Stats()
        for seed, prompt in enumerate(prompts):
            request = dw.Sampling(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=seed)
            engine.submit(prompt, request)
        engine.step()  # and the rest of the prefill
        began, steps, busy = time.perf_counter(), 0, 0.0
        while engine.num_running == len(prompts):
            step = engine.step()
            stats.add(step)
            steps, busy = steps + 1, busy + step.timings.draft + step.timings.verify
        seconds = time.perf_counter() - began
        return stats.num_tokens / seconds, stats.tau, 1000 * (seconds - busy) / steps

    return measure


def theirs(model: Any, tokens: int, temperature: float, assistant: Any = None) -> Measure:
    """Time transformers' ``generate``, less a run of one token: the prefill."""

    @torch.inference_mode()
    def measure(prompts: Prompts) -> tuple[float, float, float]:
        longest, device = max(map(len, prompts)), model.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        options = {"attention_mask": mask, "do_sample": temperature > 0, "eos_token_id": None, "pad_token_id": 0}
        options |= {"assistant_model": assistant} if assistant is not None else {}
        options |= {"temperature": temperature, "top_k": 0} if temperature > 0 else {}
        times = []
        for count in (1, tokens):
            wait(device)
            began = time.perf_counter()
            model.generate(ids, max_new_tokens=count, **options)
            wait(device)
            times.append(time.perf_counter() - began)
        return len(prompts) * (tokens - 1) / (times[1] - times[0]), float("nan"), float("nan")

    return measure


def run(ways: dict[str, Measure], prompts: Prompts, rounds: int, only_one: Sequence[str]) -> dict[str, Any]:
    """Return rates, speedups and taus of every method that supports the batch size, round by round."""
    todo = {name: way for name, way in ways.items() if len(prompts) == 1 or name not in only_one}
    found: dict[str, Any] = {name: {"rate": [], "speedup": [], "tau": [], "host": []} for name in todo}
    for turn in range(WARM_UPS + rounds):
        rates = {name: way(prompts) for name, way in todo.items()}
        for name, (rate, tau, host) in rates.items() if turn >= WARM_UPS else ():
            found[name]["rate"].append(rate)
            found[name]["speedup"].append(rate / rates["plain"][0])
            found[name]["tau"].append(tau)
            found[name]["host"].append(host)
    return found


def fold(found: dict[str, Any], batch: int, weight_bytes: int, bandwidth: float) -> list[Result]:
    results = []
    for name, rounds in found.items():
        rate, speedup, tau, host = (statistics.median(rounds[key]) for key in ("rate", "speedup", "tau", "host"))
        forwards = rate / batch / (1.0 if tau != tau else tau)  # transformers does not report tau
        share = weight_bytes * forwards / bandwidth / 1e9
        results.append(Result(name, batch, rate, speedup, tau, speedup / tau, share, host))
    return results


def picture(results: list[Result], path: Path, title: str) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for way in dict.fromkeys(result.way for result in results):
        own = [result for result in results if result.way == way]
        left.plot([r.batch for r in own], [r.tokens_per_s for r in own], "o-", label=way)
        right.plot([r.batch for r in own], [r.speedup for r in own], "o-", label=way)
    left.set(xlabel="batch", ylabel="tokens/s, all rows", xscale="log", yscale="log", title=title)
    right.set(xlabel="batch", ylabel="speedup over our baseline decoding", xscale="log")
    right.axhline(1, color="k", lw=0.8)
    right.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def show(results: list[Result], title: str) -> None:
    columns = ("batch", "way", "tokens/s", "speedup", "tau", "speedup / tau", "share of bandwidth", "host ms")
    table = Table(*columns, title=title)
    for r in results:
        known = (f"{r.tau:.2f}", f"{r.efficiency:.2f}") if r.tau == r.tau else ("-", "-")
        drafted = r.way not in ("plain", "transformers")
        share = "-" if drafted else f"{r.share:.0%}"
        table.add_row(
            str(r.batch), r.way, f"{r.tokens_per_s:.1f}", f"{r.speedup:.2f}x", *known, share, f"{r.host_ms:.2f}"
        )
    Console().print(table)


def check_device(name: str) -> torch.device:
    """Raise ConfigError if there is no such device."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"PyTorch {torch.__version__} sees no CUDA device here, and this benchmark measures one: run it on a "
            f"machine with a GPU and a CUDA build of PyTorch, or test it with --device cpu"
        )
    return torch.device(name)


def numbers(text: str, what: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{what} must be comma-separated numbers from 1, found {text!r}: such as 1,2,4")
    return found


def bench(
    target: Path,
    head: Path,
    device: torch.device,
    dtype: str,
    batches: list[int],
    budgets: list[dw.Budget],
    rounds: int,
    tokens: int,
    temperature: float,
    peer: bool,
    assistant: Path,
    num_bytes: int,
    file: Path | None,
) -> Iterator[tuple[list[Result], dict[str, Any]]]:
    """Yield the results of each batch size, and the bandwidth and size that they are compared with."""
    plain = dw.load(str(target), "none", dtype=dtype, device=str(device))
    maker = load_drafter(head, plain.target, plain.tokenizer, device=str(device))
    lms = {"plain": plain, f"{head.name} auto": dw.LM(plain.target, plain.tokenizer, maker)}
    for budget in budgets:
        lms[f"{head.name} {budget}"] = dw.LM(plain.target, plain.tokenizer, maker, budget=budget)
    ways = {name: ours(lm, tokens, temperature) for name, lm in lms.items()}
    if peer:
        load = partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=False)
        model = load(target, dtype=DTYPES[dtype]).to(device).eval()
        small = load(assistant, dtype=DTYPES[dtype]).to(device).eval()
        ways["transformers"] = theirs(model, tokens, temperature)
        ways["transformers assisted"] = theirs(model, tokens, temperature, small)
    texts = read_prompts(file) if file is not None else shipped_prompts()
    prompts = [plain.encode(text) for text in texts]
    bandwidth, weight_bytes = copy_bandwidth(device, num_bytes), plain.target.num_weight_bytes
    measured = {"copy_gb_per_s": round(bandwidth, 1), "weight_mb": round(weight_bytes / 1e6, 1)}
    for batch in batches:
        chosen = [prompts[index % len(prompts)] for index in range(batch)]
        found = run(ways, chosen, rounds, ["transformers assisted"])
        yield fold(found, batch, weight_bytes, bandwidth), measured


def rounded(result: Result) -> dict[str, Any]:
    values = asdict(result)
    return {key: value if not isinstance(value, float) else _digits(value) for key, value in values.items()}


def _digits(value: float) -> float | None:
    return None if value != value else float(f"{value:.4g}")  # JSON has no NaN


def main(
    target: Annotated[Path, typer.Argument(help="Folder of the target, such as inflate.py writes.")],
    head: Annotated[Path | None, typer.Option(help="Folder of its EAGLE head. [default: eagle3 next to it]")] = None,
    device: str = "cuda",
    dtype: Annotated[str | None, typer.Option(help="[default: bfloat16, on a CPU float32]")] = None,
    batches: str = "1,2,4,8,16,32,64",
    chains: Annotated[str, typer.Option(help="Depths of fixed chains.")] = "1,2,3,5,8",
    tree: Annotated[bool, typer.Option(help="Also EAGLE-2's tree of 60 nodes.")] = True,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    tokens: Annotated[int, typer.Option(min=2)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    peer: Annotated[bool, typer.Option(help="Also transformers, plain and assisted (at batch 1).")] = True,
    assistant: Annotated[Path, typer.Option(help="The small model that assists transformers.")] = SHIPPED
    / "toy"
    / "draft",
    prompts: Annotated[Path | None, typer.Option(help="[default: the shipped ones]")] = None,
    copied_mb: Annotated[int, typer.Option(min=1, help="Copied for the bandwidth.")] = 1024,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw them here.")] = None,
) -> None:
    """Measure a target and its head on a GPU, batch by batch, and transformers."""
    found: list[Result] = []
    try:
        where = check_device(device)
        kind = dtype or ("bfloat16" if where.type == "cuda" else "float32")
        if kind not in DTYPES:
            raise ConfigError(f"unknown dtype {kind!r}: choose one of {', '.join(DTYPES)}")
        budgets = [dw.Budget(depth) for depth in numbers(chains, "--chains")] + [dw.Budget(8, 10, 60)] * tree
        heading = head or target.parent / "eagle3"
        sizes = numbers(batches, "--batches")
        title = f"{target.parent.name}/{target.name}, {kind}, {tokens} tokens, T={temperature:g}, {where}"
        settings = {"rounds": rounds, "tokens": tokens, "temperature": temperature, "dtype": kind, "device": str(where)}
        at = {"machine": describe_machine(), "date": datetime.now(UTC).date().isoformat()}
        for new, measured in bench(
            target, heading, where, kind, sizes, budgets, rounds, tokens, temperature, peer, assistant,
            copied_mb * 10**6, prompts,
        ):  # fmt: skip
            found += new
            show(new, title)
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                result = {
                    "results": [rounded(each) for each in found],
                    "measured": measured,
                    "settings": settings,
                    **at,
                }
                output.write_text(json.dumps(result, indent=2) + "\n")
    except DraftwingError as error:
        console.error(str(error))
        raise typer.Exit(2) from None
    if png is not None:
        picture(found, png, title)


if __name__ == "__main__":
    typer.run(main)
