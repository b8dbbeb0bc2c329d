"""Forwards without gradients.

``torch.inference_mode`` takes some microseconds each time it is entered, and a step of a small model enters it once for
each of its parts. Here it is entered where it is not on yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["inference"]

P = ParamSpec("P")
T = TypeVar("T")


def inference(function: Callable[P, T]) -> Callable[P, T]:
    """The function, run in inference mode."""

    @wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **named)
        with torch.inference_mode():
            return function(*args, **named)

    return run
