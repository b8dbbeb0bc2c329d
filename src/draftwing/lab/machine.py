"""Describe the machine and target that a figure was measured on, and measure how fast the machine reads memory."""

from __future__ import annotations

import os
import platform
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from draftwing.cpu.library import get_kernel
from draftwing.models.target import Target


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
