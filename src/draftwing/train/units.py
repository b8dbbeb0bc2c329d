"""Every matrix learns in the units of what it reads.

A target's hidden states have a few channels a hundred times larger than the rest. An optimizer that moves all weights
of a matrix alike (Muon makes all singular values of an update equal, Adam all its entries) moves what such a channel
adds a hundred times as far. So matrices are trained as ``W' = W diag(s)``, where s is the root mean square of each
input channel on the first batch, as if every input had size one: around an optimizer's step weights are multiplied by
s, and gradients divided by it. s is a power of two, so nothing is rounded. Nets and files keep W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["in_units", "input_sizes"]

LEAST = 2.0**-10  # of a channel that is silent on the first batch


class _Inputs(TorchFunctionMode):
    """Adds up the squares of what matrices are multiplied by."""

    def __init__(self, matrices: Mapping[int, str]) -> None:
        super().__init__()
        self._matrices = matrices
        self.squares: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and (name := self._matrices.get(id(args[1]))) is not None:
            rows = args[0].detach().flatten(0, -2).float()
            self.squares[name] = self.squares.get(name, 0) + rows.square().sum(0)
            self.counts[name] = self.counts.get(name, 0) + len(rows)
        return func(*args, **(kwargs or {}))


def input_sizes(net: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """The root mean square of each input channel of each trained matrix, to the nearest power of two.

    Args:
        run: calls the net on a batch.

    Returns:
        (in,) by the parameter's name; of matrices that ``run`` does not multiply with, nothing.
    """
    matrices = {id(p): name for name, p in net.named_parameters() if p.ndim == 2 and p.requires_grad}
    with torch.no_grad(), _Inputs(matrices) as seen:
        run()
    means = {name: total / seen.counts[name] for name, total in seen.squares.items()}
    return {name: mean.sqrt().clamp(min=LEAST).log2().round().exp2() for name, mean in means.items()}


@contextmanager
def in_units(net: nn.Module, sizes: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it, weights and gradients are those of matrices that read inputs of size one."""
    with torch.no_grad():
        scaled = [(p, sizes[name].to(p.dtype)) for name, p in net.named_parameters() if name in sizes]
        for p, size in scaled:
            p.mul_(size)
            if p.grad is not None:
                p.grad.div_(size)
        try:
            yield
        finally:
            for p, size in scaled:
                p.div_(size)
