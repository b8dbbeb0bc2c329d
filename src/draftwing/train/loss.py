"""The loss of one update: the net is unrolled over a batch, and each step is scored against the target.

Shape suffixes: B rows, T tokens, C entries of a row, R entries that count, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.methods.net import DraftNet, Scored
from draftwing.methods.objectives import DraftLoss, StepGuesses
from draftwing.methods.registry import method_of_net
from draftwing.methods.unroll import unroll
from draftwing.models.linear import Linear
from draftwing.train.features import FeatureBatch


@dataclass(frozen=True, eq=False)
class Truth:
    """The target's prediction after every position of a batch."""

    probs: Tensor  # (B * T, V) p restricted to the draft vocabulary and renormalised
    best: Tensor  # (B, T) the draft id of the target's best token; -1 if the draft vocabulary lacks it
    last: Tensor  # (B * T, H) the hidden states that EAGLE-1 predicts
    counts: Tensor  # (B, T) bool: whether the prediction of the token *at* a position counts
    # (B * T, 1) the draft id of the text's next token, -1 if the draft vocabulary lacks it or the text ends; in the
    # dtype of ``probs``, since some objectives take it instead.
    after: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, scored: FeatureBatch, head: Linear, target_ids: Tensor | None, dtype: torch.dtype) -> Truth:
        """Compute p from the target's logits, in ``dtype`` (float32 or wider).

        Args:
            head: the target's LM head, not prepacked.
            target_ids: (V,) ascending: the tokens of the draft vocabulary; None for all.
        """
        after, best, last = scored.batch.ids[:, 1:], scored.best, scored.last.flatten(0, 1)
        if best is not None and target_ids is not None:  # no logit outside the draft vocabulary is needed
            vocab_size = head.weight.shape[0]
            logits = F.linear(last, head.weight[target_ids].to(last.dtype))
        else:
            logits = scored.logits_of(head).flatten(0, 1)
            best, vocab_size = logits.argmax(-1).view(scored.last.shape[:2]), logits.shape[-1]
            logits = logits if target_ids is None else logits.index_select(-1, target_ids)
        if target_ids is not None:
            draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
            draft_ids[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
            best, after = draft_ids[best], draft_ids[after]
        probs = logits.to(dtype).softmax(-1)
        after = F.pad(after, (0, 1), value=-1).reshape(-1, 1).to(probs.dtype)
        return cls(probs, best, last, scored.batch.mask, after)

    def rows(self, step: int, entries: Tensor, *, of_text: bool = False) -> tuple[Tensor, Tensor]:
        """Return indices (R,) of a step's ``entries`` (C,) that count, into B * C, and of their truth, into B * T.

        Entry i of step s predicts the token at i + 2 + s, and position i + 1 + s has the target's prediction of it.
        With ``of_text``, the text's own token must be in the draft vocabulary too.
        """
        length = self.counts.shape[1]
        places = entries + 1 + step  # positions of the target's predictions
        inside = places + 1 < length
        places = places.clamp(max=length - 2)
        keep = inside & self.counts[:, places + 1] & (self.best[:, places] >= 0)
        if of_text:
            keep &= self.after.view(self.counts.shape)[:, places] >= 0
        row, entry = keep.nonzero(as_tuple=True)
        return row * len(entries) + entry, row * length + places[entry]


class UnrolledLoss(DraftLoss):
    """The loss of an unrolled net; see ``unroll`` for its later share."""

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


def loss_of(net: DraftNet, *args: Any) -> Any:
    """Make the loss of the net's method, by default ``UnrolledLoss``, with these arguments after the net."""
    return (method_of_net(net).loss or UnrolledLoss)(net, *args)
