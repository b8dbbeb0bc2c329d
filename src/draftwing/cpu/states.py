"""States of recurrent layers in the CPU kernel (``native/recurrence.h``).

Shape suffixes: L recurrent layers, B rows, V value heads, T tokens, C columns that are kept of a layer's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwing.cpu.layout import BatchStruct
from draftwing.errors import ConfigError
from draftwing.models.cache import grown, round_up
from draftwing.models.config import DeltaConfig
from draftwing.torch_utils import clear, put


class KernelStates:
    """The states of all rows after some of their tokens, and the inputs of the tokens and nodes after these.

    A forward first takes the states to the row's length. So a tree's nodes are committed like KV slots, by moving their
    inputs.
    """

    def __init__(self, delta: DeltaConfig, num_layers: int) -> None:
        self._before = delta.conv_size - 1
        self._states = torch.zeros(num_layers, 0, delta.num_value_heads, delta.key_dim, delta.value_dim)
        self._kept = torch.zeros(num_layers, 0, 0, delta.conv_width + 2 * delta.num_value_heads)
        # (B, 2): the tokens that the states are of, and those that the kept inputs end with
        self._marks = torch.zeros(0, 2, dtype=torch.int64)

    def clear(self, row: int) -> None:
        """Forget a row."""
        if row < len(self._marks):
            for part in (self._states[:, row], self._kept[:, row], self._marks[row]):
                clear(part)

    def move(self, source: int, target: int) -> None:
        """Let row ``source`` take the place of ``target``; if they are the same, forget it."""
        if source == target or source >= len(self._marks):  # the latter has read nothing
            self.clear(target)
            return
        for part in (self._states, self._kept, self._marks[None]):
            put(part[:, target], part[:, source])

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        """Do nothing: the next forward finds the inputs of the accepted nodes."""

    def set_batch(self, batch: BatchStruct, first_row: int = 0) -> None:
        """Write where the states and inputs of the rows from ``first_row`` on lie."""
        batch.states, batch.kept = (part[:, first_row:].data_ptr() for part in (self._states, self._kept))
        batch.marks = self._marks[first_row:].data_ptr()
        batch.states_layer, batch.states_row = self._states.stride()[:2]
        batch.kept_layer, batch.kept_row, batch.kept_width = self._kept.stride()[:3]
        batch.kept_before, batch.num_recurrent = self._before, len(self._states)

    def prepare(
        self, batch: BatchStruct, first_row: int, lengths: Sequence[int], nodes: int, *, keeps_all: bool = False
    ) -> None:
        """Make room for a forward of trees of ``nodes`` nodes at ``lengths``, and write its fields.

        Raises:
            ConfigError: a row has states of tokens beyond its length, or lacks inputs of tokens before it.
        """
        self._reserve(first_row + len(lengths), self._before + (0 if keeps_all else nodes))
        marks = self._marks[first_row : first_row + len(lengths)].tolist()
        for length, (start, end) in zip(lengths, marks, strict=True):
            if not start <= length <= end:
                raise ConfigError(
                    f"a row of {length} tokens cannot be continued with the recurrent states of {start} tokens, "
                    f"followed by {end - start} others: prefill the row again"
                )
        self.set_batch(batch, first_row)
        batch.keeps_all = int(keeps_all)

    def _reserve(self, num_rows: int, num_kept: int) -> None:
        layers, rows, kept, width = self._kept.shape
        if num_rows <= rows and num_kept <= kept:
            return
        if num_rows > rows:
            num_rows = max(num_rows, 2 * rows)
            self._states = grown(self._states, (layers, num_rows, *self._states.shape[2:]))
            self._marks = grown(self._marks, (num_rows, 2))
        shape = layers, max(rows, num_rows), max(kept, round_up(num_kept, 16)), width
        self._kept = grown(self._kept, shape)
