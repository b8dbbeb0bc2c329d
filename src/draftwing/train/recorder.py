"""A drafter that keeps the target's hidden states of all that is decoded, whatever drafts beside it.

The target computes them anyhow, and gives them to drafters that ask for them: of a prompt as a row is admitted, of each
step's tree as it is observed. So the loop needs no hook, and rejected nodes leave nothing behind.

Shape suffixes: B rows, N nodes, P nodes on a path, T tokens, S hidden states, H hidden, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.lm import LM
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import Context, FeatureSpec, TargetOutput
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

Take = Callable[[Sequence[int], Tensor], None]


class Recorder(Drafter):
    """Drafts as ``inner`` does, and hands out the states of each row that leaves.

    Args:
        states: which hidden states, counted as ``FeatureSpec.taps``.
        hidden_size: H of the target.
        take: called with a row's T tokens, prompt first, and (T - 1, S * H) their states in bfloat16: all that the
            target has read for sure. Whether it read the last token too depends on what was drafted.
    """

    def __init__(self, inner: Drafter, states: Sequence[int], hidden_size: int, take: Take) -> None:
        own = inner.features.taps
        taps = (*own, *(state for state in states if state not in own))
        self.copy_capabilities(inner)
        self.name, self.identity, self.features = inner.name, inner.identity, FeatureSpec(taps)
        self.resumes = self.lists = False  # it takes down whole texts
        self._inner, self._take = inner, take
        self._own_width = len(own) * hidden_size
        self._columns = [slice(place * hidden_size, (place + 1) * hidden_size) for place in map(taps.index, states)]
        self._rows: list[list[Tensor]] = []  # pieces (P, S * H) of each row

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        pieces = [self._recorded(features)[0]]
        self._inner.admit(ctx, self._own(features))
        self._rows.append(pieces)

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        return self._inner.propose(ctx, sampling, budget)

    @torch.inference_mode()
    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """See ``Drafter``. The kept path is what the target has read of the text."""
        self._inner.observe(ctx, tree, accepted, replace(output, features=self._own(output.features)))
        kept = self._recorded(output.features_on(tree, accepted.path))
        if kept.shape[1] == 1:
            for pieces, own in zip(self._rows, kept, strict=True):
                pieces.append(own)
        else:
            for pieces, own, num in zip(self._rows, kept, accepted.num.tolist(), strict=True):
                pieces.append(own[: num + 1].clone())  # a view would keep the whole path

    def remove(self, ctx: Context, row: int) -> None:
        tokens = ctx.rows[row].tokens
        self._take(tokens, torch.cat(self._rows[row])[: len(tokens) - 1].cpu())
        self._inner.remove(ctx, row)
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def _own(self, features: Tensor | None) -> Tensor | None:
        if features is None or not self._own_width:
            return None
        return features if self._own_width == features.shape[-1] else features[..., : self._own_width]

    def _recorded(self, features: Tensor | None) -> Tensor:
        """(B, T, F) -> (B, T, S * H) in bfloat16, copied: the next forward may write over the features."""
        if features is None:
            raise ConfigError(
                "the target gave no hidden states to keep: let its prefill and forward return the features that their "
                "context asks for"
            )
        return torch.cat([features[..., columns].to(torch.bfloat16) for columns in self._columns], -1)


def recording(lm: LM, states: Sequence[int], take: Take) -> LM:
    """An ``LM`` that says the same, and keeps the target's states on the way: see ``Recorder``."""
    make, hidden_size = lm.new_drafter, lm.target.hidden_size
    return LM(
        lm.target,
        lm.tokenizer,
        lambda: Recorder(make(), states, hidden_size, take),
        lm.rule,
        lm.budget,
        lossless=lm.lossless,
    )
