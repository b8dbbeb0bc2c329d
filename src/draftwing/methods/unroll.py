"""Training-time test: run a network on its own outputs, for all positions at once (EAGLE-3, 2503.01840).

At step s entry i is the s-th token drafted after position i: it reads the token at i + 1 + s and the state of step
s - 1 at i, has position i + s, and attends to the same entries as while drafting: the true ones up to i, and steps
1..s of its chain. HASS (2408.15766) unrolls EAGLE-1 in the same way.

P-EAGLE (2602.01469) is trained with the same entries and the same attention. Its entries after step 0 read a mask
instead of the text and of earlier states, so the steps are those of one forward.

Shape suffixes: B rows, T tokens, E = T - 2 entries, R = B * E, K heads, G query heads of a KV head, D head dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.methods.net import DraftNet, Scored
from draftwing.methods.objectives import DraftLoss, StepGuesses
from draftwing.models.attention import CausalAttention, HeadTraits


class UnrolledAttention(CausalAttention):
    """An ``Attend`` for the steps of an unroll, called once for each step and layer.

    Keys: causal over step 0, plus the diagonal of each step from 1 to the present one.
    """

    def __init__(self, num_rows: int, length: int, num_layers: int, scale: float) -> None:
        super().__init__(num_rows, length, [None] * num_layers, scale, torch.empty(0))  # ``unroll`` sets the rotation
        self._seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]  # keys, values of each step
        self._bias: Tensor | None = None
        self._chosen: Tensor | None = None

    def again(self) -> UnrolledAttention:
        """Return a copy for another unroll over the same true entries, after step 0."""
        other = copy.copy(self)
        other._seen = [steps[:1] for steps in self._seen]
        return other

    def choose(self, entries: Tensor) -> None:
        """Continue only these entries (C,), ascending, from the next step on; the others' true keys stay."""
        self._chosen, self._bias = entries, None

    def mix(self, layer: int, traits: HeadTraits, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: (R, heads, D) each -> (R, heads * D)."""
        length = self._length if self._chosen is None else len(self._chosen)
        shape = (self._rows, length, -1, q.shape[-1])
        keys, values = k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)  # (B, K, E, D)
        seen = self._seen[layer]
        seen.append((keys, values))
        if len(seen) == 1:
            return super().mix(layer, traits, q, k, v)
        heads = keys.shape[1]
        queries = q.view(self._rows, length, heads, -1, shape[3]).permute(0, 2, 3, 1, 4)  # (B, K, G, E, D)
        queries = queries * self._scale
        folded = queries.flatten(2, 3)  # the queries of a KV head in one block, so that keys are not copied
        (true_keys, true_values), *steps = seen
        true = (folded @ true_keys.transpose(2, 3)).view(*queries.shape[:-1], self._length)
        if self._bias is None or self._bias.dtype != true.dtype:
            bias = true.new_full((self._length, self._length), float("-inf")).triu_(1)
            self._bias = bias if self._chosen is None else bias[self._chosen]
        true = true + self._bias
        chain = [(queries * step_keys[:, :, None]).sum(-1, keepdim=True) for step_keys, _ in steps]
        weights = torch.cat([true, *chain], -1).softmax(-1).to(values.dtype)
        on_true, on_chain = weights[..., : self._length], weights[..., self._length :]
        mixed = (on_true.flatten(2, 3) @ true_values).view_as(queries)
        for step, (_, step_values) in enumerate(steps):
            mixed = mixed + on_chain[..., step : step + 1] * step_values[:, :, None]
        return mixed.permute(0, 3, 1, 2, 4).reshape(self._rows * length, -1)


def unroll(
    net: DraftNet,
    ids: Tensor,
    features: Tensor,
    num_steps: int,
    later_share: float = 1.0,
) -> Iterator[StepGuesses]:
    """Run ``net`` for ``num_steps`` steps, each on the states of the one before, with gradients through all of them.

    Entry i of step s is valid if i + 2 + s < T.

    Args:
        ids: (B, T); ``features`` (B, T, F) or (B, E, F) are the target's, of the same tokens.
        later_share: share of the entries, drawn at random, that continue after step 0. Entries of later steps do not
            see each other, so the loss stays unbiased, and an update costs less.
    """
    rows, length = ids.shape
    count = length - 2
    states = net.fuse(features[:, :count].reshape(rows * count, -1))
    shape, rotary = net.shape, net.rotary
    first = 1 if shape.is_shifted else 0
    padded = torch.cat([ids, ids.new_zeros(rows, num_steps)], 1)
    mask = net.mask_entry()
    attend = UnrolledAttention(rows, count, shape.num_layers, max(shape.head_dim, 1) ** -0.5)
    entries = torch.arange(count, device=ids.device)
    for step in range(num_steps):
        if step == 1 and later_share < 1:
            entries = torch.randperm(count)[: max(1, round(later_share * count))].sort().values.to(ids.device)
            states = states.view(rows, count, -1)[:, entries].flatten(0, 1)
            attend.choose(entries)
        tokens = padded[:, first + step + entries].reshape(-1)
        if step and mask is not None:
            tokens, states = torch.full_like(tokens, mask[0]), mask[1].expand(len(tokens), -1)
        attend.cis = rotary.cis(entries.repeat(rows) + step, upto=length + num_steps).view(len(tokens), 1, -1)
        read, states = net.forward(tokens, states, attend)
        yield StepGuesses(step, entries, read, states=states)


class UnrolledLoss(DraftLoss):
    """The loss of a net that is unrolled over a batch, the default of ``NetMethod``."""

    def check(self) -> None:
        """Raise ConfigError if the net's own LM head has a bias."""
        if self.net.head is not None and self.net.head.bias is not None:
            raise ConfigError(
                f"a net of kind {self.net.kind!r} has an LM head with a bias, which would not be trained: make the "
                f"head without one"
            )

    def steps(self, scored: Scored, num_steps: int) -> Iterator[StepGuesses]:
        features = self.noisy(scored, scored.batch.ids.shape[1] - 2)  # the last two positions have no entry
        return unroll(self.net, scored.batch.ids, features, num_steps, self.later_share if self.training else 1.0)
