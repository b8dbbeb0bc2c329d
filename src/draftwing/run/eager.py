"""A net run by PyTorch, operator by operator, over the slots of one decoder.

Shape suffixes: B rows, W entries, R = B * W, F features, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.model.attention import CausalAttention, TreeSlots
from draftwing.model.cache import KEY_BLOCK, KVCache, View, round_up
from draftwing.model.linear import MIN_ROWS
from draftwing.model.views import attention_over
from draftwing.run.forward import Entries, Net, Runner, on_device
from draftwing.tree import DraftTree

__all__ = ["EagerRunner", "Inputs", "TorchRuntime", "score"]


@dataclass(frozen=True)
class Inputs:
    """What a forward reads, on the device: in a recording the host knows none of it.

    Attributes:
        tree, first_node, first_row, states: as in ``Entries``.
        ids: (B, W) what each entry reads; unused ones hold PAD.
        lengths_B: (B,) slots before the trees.
        lengths: the same on the host, None in a recording.
        width: slots that attention looks at.
        upto: positions that are reached, at most.
        prompts_B: (B, 1) lengths of the prompts, or None.
        view, watched: as in ``Entries``.
    """

    tree: DraftTree
    ids: Tensor
    states: Tensor | None
    lengths_B: Tensor
    lengths: Sequence[int] | None
    width: int
    upto: int
    first_node: int = 0
    first_row: int = 0
    prompts_B: Tensor | None = None
    view: View | None = None
    watched: Tensor | None = None


class EagerRunner(Runner):
    """See ``Runner``."""

    def forward(
        self, entries: Entries, *, want_logits: bool = True, last: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``Runner.forward``."""
        device, prompts, upto = self.net.device, entries.prompt_lengths, entries.upto
        self.cache.hold(entries.first_row, entries.lengths, entries.tree.num_nodes)
        read, out = self.hidden(
            Inputs(
                entries.tree,
                entries.tokens,
                entries.states,
                on_device(entries.lengths, device),
                entries.lengths,
                round_up(upto, KEY_BLOCK),
                upto,
                entries.first_node,
                entries.first_row,
                None if prompts is None else on_device(prompts, device)[:, None],
                entries.view,
                entries.watched,
            )
        )
        if last is not None:
            read = read.gather(1, last.expand(-1, 1, read.shape[2]))
            out = None if out is None else out.gather(1, last.expand(-1, 1, out.shape[2]))
        return (self.logits(read) if want_logits else None), out

    def hidden(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """What the LM head reads (B, W, H), and what else the net gives out (B, W, F or H) or None."""
        net, tree, first_node = self.net, inputs.tree, inputs.first_node
        rows, nodes = inputs.ids.shape
        real = rows * nodes
        positions = inputs.lengths_B[:, None] + tree.depths[:, first_node:]
        cis = net.rotary.cis(positions, inputs.prompts_B, upto=inputs.upto).view(real, 1, -1)
        padding = max(MIN_ROWS - real, 0)  # padded once here, not in every matrix
        ids = F.pad(inputs.ids.clamp(min=0).reshape(-1), (0, padding))
        states = None if inputs.states is None else F.pad(inputs.states.flatten(0, 1), (0, 0, 0, padding))
        slots = TreeSlots(
            self.cache, tree, inputs.lengths_B, inputs.lengths, inputs.first_row, first_node, inputs.width,
            inputs.view, inputs.watched,
        )  # fmt: skip
        shape, attend = net.shape, None
        if shape.num_layers:
            attend = attention_over(slots)(cis, slots, shape.windows, shape.num_heads, real + padding)
        read, out = net.forward(ids, states, attend)
        return read[:real].view(rows, nodes, -1), None if out is None else out[:real].view(rows, nodes, -1)

    def logits(self, read: Tensor) -> Tensor:
        """(B, W, H) -> (B, W, V)."""
        rows, nodes, _ = read.shape
        real = rows * nodes
        found: Tensor = self.net.logits(F.pad(read.reshape(real, -1), (0, 0, 0, max(MIN_ROWS - real, 0))))
        return found[:real].view(rows, nodes, -1)

    def fuse(self, features: Tensor) -> Tensor:
        """See ``Runner.fuse``."""
        found: Tensor = self.net.fuse(features.flatten(0, 1))
        return found.view(*features.shape[:2], -1)


class TorchRuntime:
    """See ``Runtime``."""

    name = "torch"

    def runner(self, net: Net, holder: object, cache: KVCache | None = None) -> EagerRunner:
        """See ``Runtime.runner``."""
        return EagerRunner(net, cache)


def score(net: Net, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Whole texts (B, T) in one causal forward: logits (B, T, V), and what else the net gives out or None."""
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).repeat(rows)
    cis = net.rotary.cis(positions, torch.full_like(positions, length), upto=length).view(rows * length, 1, -1)
    attend = CausalAttention(rows, length, net.shape.windows, net.shape.head_dim**-0.5, cis)
    read, out = net.forward(ids.reshape(-1), None, attend)
    logits = net.logits(read).view(rows, length, -1)
    return logits, None if out is None else out.view(rows, length, -1)
