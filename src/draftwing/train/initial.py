"""How a net starts: close to what the target knows, and with its inputs on one scale."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.model.layers import GatedMLP
from draftwing.model.linear import Linear
from draftwing.nets.eagle import EagleNet

__all__ = ["initialise"]


@torch.no_grad()
def initialise(net: EagleNet, target_head: Linear, features: Tensor) -> None:
    """Set a new net's weights.

    The state starts as the highest tap, the layer adds little to it, and EAGLE-3's head is the target's. Hidden states
    have a few channels a hundred times larger than the rest, behind which a random fc would see nothing else: each
    channel is divided by its own size, measured on ``features`` (any number of rows, F).
    """
    config, hidden = net.config, net.config.hidden_size
    fc, mlp = net.fc.weight, net.layer.mlp
    assert isinstance(mlp, GatedMLP)
    net.layer.out.weight.mul_(0.3)
    mlp.down.weight.mul_(0.3)
    fc.mul_(0.3)
    fc[:, -hidden:] += torch.eye(hidden, dtype=fc.dtype, device=fc.device)
    if config.version == 1:
        return
    seen = net.fc_input(features.reshape(-1, features.shape[-1]).to(fc.dtype))
    fc.div_(seen.square().mean(0).sqrt().clamp(min=1e-4))
    if net.head is not None:
        rows = target_head.weight if net.target_ids is None else target_head.weight[net.target_ids]
        net.head.weight.copy_(rows)
