"""Domino, of SpecForge: DFlash whose guesses depend on all tokens before them in the block, through a recurrent state.

    state of a node  = GRU(embedding of its token, state of its parent)
    logits of a mask = LM head(x) + B silu(A [x; state])        B and A of low rank

The first guesses of a block (``num_uncorrected``) are DFlash's own. A node costs three small products and a thin LM
head, in the order of DSpark's.

Shape suffixes: see ``methods.block``; S rank, G size of the recurrent state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.methods.dflash import DFlash
from draftwing.methods.dspark import CorrectedNet, DSparkConfig


@dataclass(frozen=True, kw_only=True)
class DominoConfig(DSparkConfig):
    """The shape of a Domino net."""

    state_size: int = 1024  # G
    num_uncorrected: int = 1  # levels that ignore the tokens before them


class DominoNet(CorrectedNet):
    """A DFlash net with a GRU over the tokens of a path."""

    kind = "domino"
    config: DominoConfig

    def __init__(self, config: DominoConfig, *parts: Any, **options: Any) -> None:
        super().__init__(config, *parts, **options)
        size, width = config.state_size, config.hidden_size
        # The rows of the reset gate, the update gate and the candidate.
        self.read_token, self.read_state = self.new_matrix(3 * size, width), self.new_matrix(3 * size, size)
        self.mix = self.new_matrix(config.rank, width + size)

    def correct(self, level: int, x: Tensor, tokens: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the correction's activations, and the GRU's state after the tokens."""
        size = self.config.state_size
        state = x.new_zeros(len(x), size) if carried is None else carried
        token = self.read_token.forward(self.embedding.forward(tokens).to(self.dtype))
        before = self.read_state.forward(state)
        reset, update = (token[:, : 2 * size] + before[:, : 2 * size]).sigmoid().split(size, 1)
        candidate = (token[:, 2 * size :] + reset * before[:, 2 * size :]).tanh()
        state = candidate + update * (state - candidate)
        if level < self.config.num_uncorrected:
            return x.new_zeros(len(x), self.config.rank), state
        return F.silu(self.mix.forward(torch.cat([x, state], -1))), state


class Domino(DFlash):
    """A block of masks over the target's features: see ``DominoNet``."""

    net = DominoNet
    config = DominoConfig
    layouts = ("draftwing", "sglang")
