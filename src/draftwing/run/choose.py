"""What runs a net: chosen once, when its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftwing.model.linear import Layout
from draftwing.run.eager import TorchRuntime
from draftwing.run.forward import Runtime
from draftwing.run.graphs import GraphRuntime
from draftwing.run.kernel.library import get_kernel
from draftwing.run.kernel.program import ACTIVATIONS
from draftwing.run.kernel.runner import KernelRuntime
from draftwing.run.recording import CudaRecorder, Record

__all__ = ["Needs", "record_with", "runtime_for"]

_DIM = 32  # the kernel mixes heads so many channels at a time


@dataclass(frozen=True)
class Needs:
    """What the choice depends on.

    Attributes:
        dtype: what is computed in.
        is_dense: it has no experts.
        may_round: where ``dtype`` is bfloat16, states may be float32 that products alone round.
    """

    dtype: torch.dtype
    device: torch.device
    head_dim: int
    activation: str
    is_dense: bool = True
    may_round: bool = False

    @property
    def suits_kernel(self) -> bool:
        """Whether the CPU kernel runs such layers: float32 or bfloat16, dense, heads of whole vectors."""
        computes = self.dtype == torch.float32 or (self.may_round and self.dtype == torch.bfloat16)
        fits = computes and self.device.type == "cpu" and self.is_dense
        return fits and self.activation in ACTIVATIONS and self.head_dim % _DIM == 0 and self.head_dim <= 1024


def runtime_for(
    needs: Needs, *, prepack: bool = True, quantize: str | None = None, fast: bool = False
) -> tuple[Runtime, Layout]:
    """What runs such a net here, and how its matrices are to lie.

    Args:
        prepack: False keeps plain weights, for training.
        quantize: how matrices are quantised.
        fast: take 8 bits too where the CPU kernel is faster by them: for what drafts, whose law nobody keeps.
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
    """The same, but recording with ``record``, or eager where that is None; the CPU kernel needs no recordings."""
    if runtime.name == "kernel":
        return runtime
    return GraphRuntime(record) if record is not None and is_dense else TorchRuntime()
