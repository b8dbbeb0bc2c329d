"""Matrix times rows, laid out for decoding: few rows, all of the weight read for each.

On a CPU ``F.linear`` is slow for 2 to 16 rows, and a row's last bits depend on how many rows are beside it. oneDNN
with prepacked weights has neither fault: on a 64 MB float32 matrix 8 rows cost 1.1 times one row (``F.linear``: 2.5
times), and for two rows or more each row's bits are its own. Both are what verification lives on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MIN_ROWS", "Linear", "can_prepack"]

_product, _product_added = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary
MIN_ROWS = 4  # on AVX-512, 4 rows take a faster kernel than 1 or 2, and the same bits as any larger number


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight prepacked and is the better choice for it."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class Linear(nn.Module):
    """``x @ weight.T + bias`` with a prepacked form for inference.

    Args:
        weight: (out, in).
        bias: (out,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=bias.requires_grad)
        self.num_out, self.num_in = weight.shape
        self.dtype = weight.dtype
        self._packed: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes read for one forward."""
        return self.num_out * self.num_in * self.weight.element_size()

    def prepack(self, *, keep: bool = False) -> None:
        """Reorder the weight for oneDNN where that wins; the plain copy is dropped unless ``keep``."""
        if self._packed is None and can_prepack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
            if not keep:
                empty = torch.empty(0, dtype=self.weight.dtype)
                self.weight = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(R, in) -> (R, out); ``residual`` (R, out) is added in the same kernel where there is one."""
        packed = self._packed
        if packed is None:
            plain = F.linear(x, self.weight, self.bias)
            return plain if residual is None else residual + plain
        rows = x.shape[0]
        if rows < MIN_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_ROWS - rows))
            residual = None if residual is None else F.pad(residual, (0, 0, 0, MIN_ROWS - rows))
        if residual is None:
            out: Tensor = _product(x, packed, self.bias, "none", [], "")
        else:
            out = _product_added(x, residual, packed, self.bias, "add")
        return out[:rows] if rows < MIN_ROWS else out
