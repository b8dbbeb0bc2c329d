"""Describe machines, targets and generations: the values behind tables, cards and JSON; measure how fast memory is."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftwing.budget.costs import Costs
from draftwing.cpu.library import get_kernel, kernel_problem
from draftwing.dialogue import figures
from draftwing.formats.gguf_weights import open_weights
from draftwing.lm import LM, Generation
from draftwing.models.adapter import AdapterTarget
from draftwing.models.config import read_config
from draftwing.models.lean import LeanTarget
from draftwing.models.target import Target
from draftwing.sampling import Sampling


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, threads in use, memory, GPU and versions."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def describe_target(target: Target) -> dict[str, Any]:
    """Return a target's name, precision and device."""
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantize": target.quantized,
        "device": str(target.device),
    }


def read_bandwidth(num_bytes: int) -> float:
    """Measure GB/s of a float32 sum over ``num_bytes`` of freshly written memory: the median of five.

    The baseline's tokens per second are at most this over the bytes of weights that a token reads.
    """
    count, kernel = max(num_bytes // 4, 1), get_kernel()
    seconds = []
    for _ in range(5):
        # In huge pages, like the weights: with small pages, address translation would limit the sum.
        values = (torch.empty(count) if kernel is None else kernel.room(count, dtype=torch.float32)).fill_(1.0)
        start = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - start)
    return 4 * count / statistics.median(seconds) / 1e9


def record(done: Generation) -> dict[str, Any]:
    """Return the values that ``generate --json`` prints."""
    stats = done.stats
    values: dict[str, Any] = {
        "text": done.text,
        "token_ids": done.token_ids,
        "num_prompt_tokens": len(done.prompt_ids),
        "finish_reason": done.finish_reason,
        **figures(stats),
        "num_steps": stats.num_forwards,
        "seconds": stats.seconds,
    }
    if done.logprobs is not None:
        values["logprobs"] = [asdict(logprob) for logprob in done.logprobs]
    return values


def describe_run(lm: LM, sampling: Sampling) -> dict[str, Any]:
    """Return everything that a text depends on, except the prompt."""
    drafting = {"drafter": lm.drafter_name, "rule": lm.rule, "budget": lm.describe_budget()}
    return {**describe_target(lm.target), **drafting, "sampling": asdict(sampling)}


def describe_lm(lm: LM) -> dict[str, dict[str, Any]]:
    """Describe target, tokenizer and drafter."""
    target, drafter, folder = lm.target, lm.drafter, lm.tokenizer.folder
    about_drafter: dict[str, Any] = {"name": lm.drafter_name, "budget": lm.describe_budget()}
    if drafter.runs_as:
        is_smaller = "CPU kernel, int8" in drafter.runs_as and target.quantized is None
        note = " (only for drafts; the text is still the target's)" if is_smaller else ""
        about_drafter |= {"matrices": drafter.runs_as + note, "mb_per_token": drafter.num_bytes / 1e6}
    about_target = describe_target(target)
    if drafter.tokenizer:
        about_drafter["tokenizer"] = drafter.tokenizer
    return {
        "target": {
            "name": about_target.pop("target"),
            "family": read_config(folder).get("model_type"),
            "engine": engine_of(target),
            "parameters": _num_parameters(target, folder),
            "layers": target.num_layers,
            "hidden": target.hidden_size,
            "vocabulary": target.vocab_size,
            "context": target.max_length,
            **about_target,
            "quantize": target.quantized or "none",
            "runtime": _runtime(target),
            "matrices": target.runs_as,
            "exactness": _exactness(target),
            "mb_per_token": target.num_weight_bytes / 1e6,
        },
        "tokenizer": {
            "vocabulary": lm.tokenizer.fast.get_vocab_size(),
            "chat_template": lm.tokenizer.has_chat_template,
        },
        "drafter": about_drafter,
    }


def describe_costs(costs: Costs) -> dict[str, Any]:
    """Summarise what drafts and their verification cost, in milliseconds and shares of a baseline step."""
    plain = costs.verify_seconds(1)
    nodes = [int(count) for count, _ in costs.verify.knots if count > 1]
    return {
        "baseline_step_ms": round(1e3 * plain, 2),
        "verify_of_baseline": "  ".join(f"{n}: {costs.verify_seconds(n) / plain:.2f}" for n in nodes),
        **({"draft_step_of_baseline": round(costs.level_seconds / plain, 3)} if costs.chain.knots else {}),
        "us_per_token_of_context": round(1e6 * costs.per_token, 2),
    }


def engine_of(target: Target) -> str:
    return "transformers" if isinstance(target, AdapterTarget) else "lean"


def _runtime(target: Target) -> str:
    if target.runtime == "kernel":
        return "CPU kernel"
    is_cpu = isinstance(target, LeanTarget) and target.device.type == "cpu"
    problem = kernel_problem() if is_cpu and target.dtype in (torch.float32, torch.bfloat16) else ""
    return f"PyTorch ({problem})" if problem else "PyTorch"


def _exactness(target: Target) -> str:
    """Describe how close the logits of drafted tokens are to the baseline's: see ``Linear.runs_as``."""
    if isinstance(target, LeanTarget) and target.device.type == "cpu" and "plain" not in target.runs_as:
        return "to the bit: a drafted token's logits are the baseline's"
    return "up to rounding: several tokens in one forward may round differently than each alone"


def _num_parameters(target: Target, folder: Path) -> int:
    if isinstance(target, AdapterTarget):
        return sum(weight.numel() for weight in target.model.parameters())
    is_tied = isinstance(target, LeanTarget) and target.config.tie_word_embeddings
    with open_weights(folder) as files:  # a tied head is the embedding, even if it is saved twice
        names = files.keys()
        return sum(math.prod(files.shape(name)) for name in names if not (is_tied and name == "lm_head.weight"))
