"""Choose the runtime of a network, once, when its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftwing.cpu.library import get_kernel
from draftwing.cpu.program import ACTIVATIONS
from draftwing.cpu.runner import KernelRuntime
from draftwing.models.linear import Layout
from draftwing.runtime.forward import Runtime, TorchRuntime
from draftwing.runtime.graphs import CudaRecorder, GraphRuntime, Record

_DIM = 32  # channels of a head that the kernel processes at a time


@dataclass(frozen=True)
class Needs:
    """Properties that the choice depends on.

    Attributes:
        dtype: of the network's arithmetic.
        is_dense: True if it has no experts.
        may_round: True if ``dtype`` bfloat16 may mean float32 states that only products round.
    """

    dtype: torch.dtype
    device: torch.device
    head_dim: int
    activation: str
    is_dense: bool = True
    may_round: bool = False

    @property
    def suits_kernel(self) -> bool:
        """True if the CPU kernel runs such layers: float32 or bfloat16, dense, heads of whole vectors."""
        computes = self.dtype == torch.float32 or (self.may_round and self.dtype == torch.bfloat16)
        fits = computes and self.device.type == "cpu" and self.is_dense
        return fits and self.activation in ACTIVATIONS and self.head_dim % _DIM == 0 and self.head_dim <= 1024


def runtime_for(
    needs: Needs, *, prepack: bool = True, quantize: str | None = None, fast: bool = False
) -> tuple[Runtime, Layout]:
    """The runtime of a network on this machine, and the layout of its matrices.

    Args:
        prepack: False keeps plain weights, for training.
        quantize: "int8" or None.
        fast: use 8 bits if the CPU kernel is faster with them: for draft networks, whose distribution is not output.
    """
    kernel = get_kernel() if prepack and needs.suits_kernel else None
    if kernel is not None:
        quantize = "int8" if fast and kernel.has_int8 else quantize
        rounds = quantize is None and needs.dtype == torch.bfloat16
        return KernelRuntime(kernel), Layout("kernel", quantize, rounds=rounds)
    if needs.device.type == "cuda" and needs.is_dense:
        return GraphRuntime(CudaRecorder(needs.device)), Layout("torch" if prepack else "plain", quantize)
    return TorchRuntime(), Layout("torch" if prepack else "plain", quantize)


def record_with(runtime: Runtime, record: Record | None, *, is_dense: bool) -> Runtime:
    """Record with ``record``, or run eagerly if it is None; the CPU kernel needs no recordings."""
    if runtime.name == "kernel":
        return runtime
    return GraphRuntime(record) if record is not None and is_dense else TorchRuntime()
