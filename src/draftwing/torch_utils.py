"""PyTorch helpers: inference mode, host-to-device copies, single-thread copies, saving."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def inference(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function in inference mode, which is entered only if it is off, since that takes microseconds."""

    @wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **named)
        with torch.inference_mode():
            return function(*args, **named)

    return run


def record_event(device: torch.device) -> torch.cuda.Event:
    """A CUDA event at the current end of the device's queue."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Host numbers as int64 on a device, without waiting for the device.

    A GPU copies from pageable memory only after all earlier work; pinned memory is read asynchronously, and PyTorch
    keeps it alive until then.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


# Copies on the calling thread. PyTorch gives large copies to its thread pool, whose threads then busy-wait for more
# work for milliseconds and take processors from the following steps: a request of a small model that begins with such
# a copy takes 3% longer in total. On a CPU, NumPy copies instead, up to a size from which more threads pay off.

MAX_COPY_BYTES = 1 << 24  # one thread takes some milliseconds


def joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """``torch.cat``; a single piece is returned unchanged."""
    if len(pieces) == 1:
        return pieces[0]
    size = sum(piece.nbytes for piece in pieces)
    arrays = [array for piece in pieces if (array := _as_array(piece, size)) is not None]
    if not arrays:
        return torch.cat(list(pieces), dim)
    return torch.from_numpy(np.concatenate(arrays, dim)).view(pieces[0].dtype)


def put(into: Tensor, values: Tensor) -> None:
    """``into[...] = values``, of the same dtype and device."""
    array = _as_array(into, into.nbytes)
    if array is None:
        into[...] = values
    else:
        array[...] = _as_array(values, 0)


def clear(tensor: Tensor) -> None:
    """Fill with zeros."""
    array = _as_array(tensor, tensor.nbytes)
    if array is None:
        tensor.zero_()
    else:
        array[...] = 0


def filled(shape: Sequence[int], value: float) -> Tensor:
    """``torch.full`` in float32 on the CPU."""
    if 4 * math.prod(shape) > MAX_COPY_BYTES:
        return torch.full(tuple(shape), value)
    return torch.from_numpy(np.full(shape, value, np.float32))


def _as_array(tensor: Tensor, size: int) -> np.ndarray | None:
    """The tensor's memory, if the calling thread should copy ``size`` bytes into or out of it; else None."""
    if tensor.device.type != "cpu" or size > MAX_COPY_BYTES:
        return None
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def save_pickle(value: Any, file: Path) -> None:
    """``torch.save``, but the system's error is not lost: given a path, it does not say why it fails."""
    with file.open("wb") as stream:
        torch.save(value, stream)
