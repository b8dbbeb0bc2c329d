"""The rows of the input tokens: a table for PyTorch, or packed for the CPU kernel.

Shape suffixes: R rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.model.linear import Layout, Linear
from draftwing.model.stored import Stored
from draftwing.run.kernel.packed import Packed
from draftwing.run.kernel.program import Traced, TracedIds

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """Rows (V, H), looked up by token ids.

    Args:
        table: (V, H), which a net may train; None where they are ``packed``, in float32 or what is widened to it.
    """

    def __init__(self, table: Tensor | None, packed: Packed | None = None) -> None:
        super().__init__()
        if isinstance(table, nn.Parameter):
            self.table: Tensor | None = table
        else:
            self.register_buffer("table", table, persistent=False)
        self.packed = packed

    @classmethod
    def of_stored(cls, stored: Stored) -> Embedding:
        """Packed for the CPU kernel as a file holds them."""
        return cls(None, Packed.of_stored([stored], None))

    @classmethod
    def shared_with(cls, head: Linear) -> Embedding:
        """The rows of an LM head that the CPU kernel reads, no byte of them twice."""
        (packed,) = head.packed
        return cls(None, packed)

    @property
    def shape(self) -> tuple[int, int]:
        """V and H."""
        if self.packed is not None:
            return self.packed.num_out, self.packed.num_in
        num_tokens, width = self._table.shape
        return num_tokens, width

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that come out."""
        return torch.float32 if self.packed is not None else self._table.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return torch.device("cpu") if self.packed is not None else self._table.device

    @property
    def _table(self) -> Tensor:
        assert self.table is not None
        return self.table

    def forward(self, ids: Any) -> Any:
        """(...) ids -> (..., H)."""
        if isinstance(ids, TracedIds):
            if self.packed is None:
                raise ConfigError("an embedding was not packed for the CPU kernel: make it an attribute of the net")
            return Traced.embedding(ids, self.packed)
        if self.packed is None:
            return F.embedding(ids, self._table)
        return self.packed.rows(ids.reshape(-1)).view(*ids.shape, -1)

    def plain(self) -> Tensor:
        """(V, H) as a table."""
        found: Tensor = self._table if self.packed is None else self.forward(torch.arange(self.shape[0]))
        return found

    def view(self) -> Embedding:
        """Another one with the same numbers: what is done to it later leaves this one as it is."""
        return Embedding(self.table, self.packed)

    def lay_out(self, layout: Layout) -> Embedding:
        """Pack it where the CPU kernel runs the net."""
        if layout.runs == "kernel" and self.packed is None:
            self.packed = Packed.of(self._table.detach(), None)
            self.table = None
        return self
