"""8-bit products by oneDNN, and who may have them: the CPU kernel has its own (``run.kernel.packed``).

Only a quarter of the bytes is read. There is one scale for each output channel of the weight, and one for each row,
found as it comes: a row's numbers depend on itself alone. Between the scales there are sums of integers, which are
exact in any order, so that a row's bits are its own here too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import ConfigError, UnsupportedError
from draftwing.run.kernel.packed import MAX_LEVEL, quantize_channels

__all__ = ["MAX_INPUTS", "QUANTIZATIONS", "Int8Product", "check_quantize", "has_exact_int8"]

_pack, _product = torch.ops.onednn.qlinear_prepack.default, torch.ops.onednn.qlinear_pointwise.default

QUANTIZATIONS = ("int8",)
MAX_INPUTS = 2**31 // (255 * MAX_LEVEL)  # more could overflow a sum of 32 bits


def check_quantize(quantize: str | None, dtype: torch.dtype, device: torch.device, runs: str = "kernel") -> None:
    """Raise ConfigError or UnsupportedError where matrices cannot be quantised so; None is always right.

    ``runs``: see ``Layout``. The CPU kernel's sums of 8-bit products are exact on every processor.
    """
    if quantize is None:
        return
    if quantize not in QUANTIZATIONS:
        raise ConfigError(f"quantize must be one of {', '.join(QUANTIZATIONS)} or None, found {quantize!r:.60}")
    if device.type != "cpu":
        raise UnsupportedError(
            f"quantize={quantize!r} runs on a CPU alone, found device {str(device)!r}: choose device='cpu', or leave "
            f"quantize out"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"quantize={quantize!r} goes with dtype float32 or bfloat16, found {str(dtype).removeprefix('torch.')}: "
            f"choose one of these, or leave quantize out"
        )
    if runs != "kernel" and not has_exact_int8():
        raise UnsupportedError(
            f"quantize={quantize!r} without the CPU kernel needs a CPU that multiplies 8-bit integers exactly (AVX-512 "
            f"VNNI, AMX, AVX-VNNI), and this one, or this build of PyTorch, does not: install a C++ compiler, with "
            f"which the kernel is built, or leave quantize out"
        )


class Int8Product:
    """A matrix (out, in) in 8 bits for rows in 8 bits: both symmetric, a scale for each channel and each row.

    oneDNN wants rows unsigned, 128 for zero; signed ones would run in its reference code, hundreds of times slower.
    """

    def __init__(self, weight: Tensor) -> None:
        num_out, num_in = weight.shape
        quantised, scales = quantize_channels(weight)
        self.packed: Tensor = _pack(quantised, None)
        self.scales = scales / MAX_LEVEL  # of a row whose largest number is 1
        self._zeros = torch.zeros(num_out, dtype=torch.int32)
        self._half = torch.full((1, num_in), 128.5)  # not one number: TensorIterator is slow with two broadcast inputs

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """(R, in) -> (R, out). Few and small kernels: on small matrices they cost as much as the product."""
        wide = x if x.dtype == torch.float32 else x.float()
        largest = wide.abs().amax(1, keepdim=True)
        # To the next of the 255 levels: the conversion cuts off what half a level was added to. A row of zeros is
        # 0 / 0, NaN here, and some level or other after it; its largest number, zero, makes it zero again below.
        levels = torch.addcdiv(self._half, wide, largest, value=MAX_LEVEL).to(torch.uint8)
        out = self.product(levels)
        if residual is not None:
            out = torch.addcmul(residual if bias is None else residual + bias, out, largest)
        else:
            out = out.mul_(largest) if bias is None else torch.addcmul(bias, out, largest)
        return out if out.dtype == x.dtype else out.to(x.dtype)

    def product(self, levels: Tensor) -> Tensor:
        """(R, in) uint8 -> (R, out) float32."""
        args: tuple[Any, ...] = (self.packed, self.scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], "")
        out: Tensor = _product(levels, 1.0, 128, *args)
        return out


@cache
def has_exact_int8() -> bool:
    """Whether this machine's 8-bit products are exact: older ones add pairs of them in 16 bits, which saturates."""
    if not torch._C._has_mkldnn:
        return False
    try:
        found = Int8Product(torch.ones(32, 64)).product(torch.full((4, 64), 255, dtype=torch.uint8))
    except RuntimeError:
        return False
    return torch.allclose(found, torch.tensor(64.0), rtol=1e-5)
