"""One draft step of an EAGLE net as a program of the CPU kernel, its LM head included.

Shape suffixes: B rows, W entries, R = B * W, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwing.model.cache import KVCache
from draftwing.model.linear import Linear
from draftwing.model.rope import Rotary
from draftwing.nets.eagle import EagleNet
from draftwing.run.kernel.build import Kernel
from draftwing.run.kernel.fused import add_layer, draft_slots, tree_slots
from draftwing.run.kernel.program import Program
from draftwing.run.request import Drafted, DraftRequest, Waiting
from draftwing.tree import DraftTree

__all__ = ["FusedEagle"]


class FusedEagle:
    """Runs ``EagleNet.forward`` for a net whose matrices are fused (see ``EagleNet.prepack``).

    Args:
        head: what reads the states, fused as well: the net's own LM head, or the target's.
    """

    def __init__(self, kernel: Kernel, net: EagleNet, head: Linear) -> None:
        config, layer, hidden = net.config, net.layer, net.config.hidden_size
        program = self._program = Program(kernel)
        self._states, self._fed_back = program.outside(hidden), program.outside(hidden)
        # Whether what a draft reads are the target's features; else states, which ``EagleNet.fuse`` made of them.
        self.fuses = config.version == 1 or net.tap_norms is None
        self._features, self._num_fc = self._states, 0
        self._hidden = hidden
        if self.fuses and config.version == 3:
            self._features = program.outside(hidden * len(config.taps))
            norm = net.input_norm
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            program.linear(self._features, net.fc.fused, self._states, norm=weight, eps=eps)
            self._num_fc = len(program)
        self._logits = program.outside(config.vocab_size)
        # Tokens outside the draft vocabulary are never written: they keep -inf.
        self._logits_RV = torch.empty(0, config.vocab_size)
        both, x = program.scratch(2 * hidden), program.scratch(hidden)
        self._read = x
        qkv_width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        widths = (qkv_width, config.num_heads * config.head_dim, config.intermediate_size)
        qkv, mixed, wide = (program.scratch(width) for width in widths)
        embedding = net.embedding.contiguous()
        if net.token_norm is None or net.state_norm is None or net.norm is None:  # EAGLE-1
            program.embed(embedding, both)
            program.copy(self._states, hidden, both, hidden)
            program.linear(both, net.fc.fused, x)
            add_layer(program, layer, x, x, (qkv, mixed, wide), index=0, window=None)
            program.copy(x, hidden, self._fed_back)
            self._num_hidden = len(program)
            program.linear(x, head.fused, self._logits)
            return
        tokens = program.scratch(hidden)
        program.embed(embedding, tokens)
        program.norm(tokens, net.token_norm.weight, net.token_norm.eps, both)
        program.norm(self._states, net.state_norm.weight, net.state_norm.eps, both, hidden)
        if config.norm_before_residual:
            program.norm(self._states, net.state_norm.weight, net.state_norm.eps, x)
        else:
            program.copy(self._states, hidden, x)
        add_layer(program, layer, x, both, (qkv, mixed, wide), index=0, window=None)
        if config.norm_output:
            program.norm(x, net.norm.weight, net.norm.eps, self._fed_back)
        else:
            program.copy(x, hidden, self._fed_back)
        self._num_hidden = len(program)
        places = net.target_ids
        program.linear(x, head.fused, self._logits, norm=net.norm.weight, eps=net.norm.eps, places=places)

    def draft(
        self,
        request: DraftRequest,
        tokens: Sequence[Sequence[int]],
        features: Tensor,
        cache: KVCache,
        rotary: Rotary,
        fed: Sequence[int],
        lengths: Sequence[int],
    ) -> Drafted:
        """Read what is waiting and grow a tree for every row, without coming back to Python in between.

        Args:
            tokens: of each row's waiting entries, the last of which is the root.
            features: (B, W, F) of the same entries; states (B, W, H) without ``fuses``.
            fed: entries that lie in each row's slots already; ``lengths`` are those before the roots.
        """
        rows, entries = features.shape[:2]
        slots = draft_slots(cache, fed, entries, lengths, request.depth * request.width, rotary)
        count = rows * max(entries, request.width)
        self._make_room(count)
        states, fed_back = torch.empty(2, count, self._hidden)
        outside = {self._states: states, self._fed_back: fed_back, self._logits: self._logits_RV}
        return self._program.draft(
            request,
            outside,
            slots,
            self._logits,
            waiting=Waiting(tokens, fed, features.contiguous(), self._features),
            num_catch_up=self._num_fc,
            num_hidden=self._num_hidden,
            read=self._read,
            states=(self._states, self._fed_back),
        )

    def _make_room(self, count: int) -> None:
        if count > len(self._logits_RV):
            self._logits_RV = torch.full((max(count, 16), self._logits_RV.shape[1]), -torch.inf)

    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        tree: DraftTree,
        cache: KVCache,
        rotary: Rotary,
        lengths: Sequence[int],
        first_row: int,
        first_node: int,
        *,
        want_logits: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Target logits (B, W, V), which the next call overwrites, and the states to feed back (B, W, H).

        Args:
            tokens: (B, W) what each entry reads; unused ones hold PAD.
            states: (B, W, H).
            tree: the entries' tree, of which those from ``first_node`` on are run.
            cache: the net's own slots; ``lengths`` entries of each row, from ``first_row`` on, lie there already.
            want_logits: False where the slots alone matter: the logits are then of no use.
        """
        slots = tree_slots(cache, first_row, lengths, tree, first_node, rotary)
        states = states.contiguous()
        fed_back = torch.empty_like(states)
        rows, entries = tokens.shape
        count = rows * entries if want_logits else 0
        self._make_room(count)
        outside = {self._states: states, self._fed_back: fed_back, self._logits: self._logits_RV}
        num_ops = None if want_logits else self._num_hidden
        self._program.run(rows, entries, outside, first_op=self._num_fc, num_ops=num_ops, tokens=tokens, slots=slots)
        return self._logits_RV[:count].view(rows, -1, self._logits_RV.shape[1]), fed_back
