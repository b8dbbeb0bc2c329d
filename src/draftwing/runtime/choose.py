"""Choose the runtime of a network, once, when its weights are loaded."""

from __future__ import annotations

from collections.abc import Collection

import torch

from draftwing.cpu.library import get_kernel
from draftwing.cpu.program import ACTIVATIONS
from draftwing.cpu.runner import KernelRuntime
from draftwing.models.config import DeltaConfig, LatentConfig
from draftwing.models.linear import Layout
from draftwing.runtime.forward import Runtime, TorchRuntime
from draftwing.runtime.graphs import CudaRecorder, GraphRuntime

_DIM = 32  # channels of a head that the kernel processes at a time
_DELTA_DIM = 16  # the same in recurrent layers
_MAX_DIM = 1024


def can_trace(latent: LatentConfig | None) -> bool:
    """True if the CPU kernel runs this latent attention, or there is none."""
    return latent is None or latent.value_dim % _DIM == 0


def runtime_for(
    dtype: torch.dtype,
    device: torch.device,
    head_dims: Collection[int],
    activation: str,
    *,
    is_dense: bool = True,
    is_traceable: bool = True,
    delta: DeltaConfig | None = None,
    latent: LatentConfig | None = None,
    may_round: bool = False,
    prepack: bool = True,
    quantize: str | None = None,
    fast: bool = False,
) -> tuple[Runtime, Layout]:
    """The runtime of a network on this machine, and the layout of its matrices.

    Args:
        head_dims: the widths of its heads.
        is_dense: True if CUDA graphs can record it: it has no experts.
        is_traceable: True if the CPU kernel has all of its operations.
        delta: sizes of its recurrent layers, if it has any.
        latent: widths of its latent attention, if it has that.
        may_round: True if ``dtype`` bfloat16 may mean float32 states that only products round.
        prepack: False keeps plain weights, for training.
        quantize: "int8", "q4" or None.
        fast: use 8 bits if the CPU kernel is faster with them: for draft networks, whose distribution is not output.
    """
    # The CPU kernel runs float32 or bfloat16 layers whose heads are whole vectors.
    widths = () if delta is None else (delta.key_dim, delta.value_dim)
    is_supported = dtype == torch.float32 or (may_round and dtype == torch.bfloat16)
    is_supported &= all(width % _DELTA_DIM == 0 for width in widths)
    is_supported &= can_trace(latent)
    is_supported &= device.type == "cpu" and is_traceable and activation in ACTIVATIONS
    is_supported &= all(dim % _DIM == 0 and dim <= _MAX_DIM for dim in head_dims)
    kernel = get_kernel() if prepack and is_supported else None
    if kernel is not None:
        quantize = "int8" if fast and kernel.has_int8 else quantize
        return KernelRuntime(kernel), Layout("kernel", quantize, rounds=quantize is None and dtype == torch.bfloat16)
    layout = Layout("torch" if prepack else "plain", quantize)
    if device.type == "cuda" and is_dense and is_traceable and delta is None and latent is None:
        return GraphRuntime(CudaRecorder(device)), layout
    return TorchRuntime(), layout
