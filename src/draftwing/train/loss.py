"""One update's loss: the net unrolled over a batch, each step scored against the target.

Shape suffixes: B rows, T tokens, E = T - 2 entries, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.methods.net import DraftNet
from draftwing.methods.objectives import Objective, StepSums, feature_loss, product_dtype, step_sums
from draftwing.methods.registry import method_of_net
from draftwing.methods.unroll import UnrollStep, unroll
from draftwing.models.linear import Linear
from draftwing.train.features import FeatureBatch


@dataclass(frozen=True, eq=False)
class Truth:
    """What the target says of every token after every position of a batch.

    Attributes:
        probs: (B * T, V) p restricted to the draft vocabulary and renormalised.
        best: (B, T) the draft id of the target's best token; -1 where the draft vocabulary lacks it.
        last: (B * T, H) the hidden states that EAGLE-1 predicts.
        counts: (B, T) bool: whether the prediction of the token *at* a position counts.
        after: (B * T, 1) the draft id of the text's own next token, -1 where the draft vocabulary lacks it or the text
            ends; in the dtype of ``probs``, whose place it takes.
    """

    probs: Tensor
    best: Tensor
    last: Tensor
    counts: Tensor
    after: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, found: FeatureBatch, head: Linear, target_ids: Tensor | None, dtype: torch.dtype) -> Truth:
        """From the target's logits, in ``dtype`` (float32 or wider)."""
        if found.best is not None and target_ids is not None:
            return cls._narrow(found, found.best, head, target_ids, dtype)
        logits = found.logits_of(head)
        best, after = logits.argmax(-1), found.batch.ids[:, 1:]
        if target_ids is not None:
            place = torch.full((logits.shape[-1],), -1, dtype=torch.int64, device=logits.device)
            place[target_ids] = torch.arange(len(target_ids), device=logits.device)
            best, after, logits = place[best], place[after], logits.index_select(-1, target_ids)
        return cls._of(found, logits.to(dtype).softmax(-1).flatten(0, 1), best, after)

    @classmethod
    def _of(cls, found: FeatureBatch, probs: Tensor, best: Tensor, after: Tensor) -> Truth:
        """With ``after`` still (B, T - 1) int64."""
        padded = F.pad(after, (0, 1), value=-1).reshape(-1, 1).to(probs.dtype)
        return cls(probs, best, found.last.flatten(0, 1), found.batch.mask, padded)

    @classmethod
    def _narrow(cls, found: FeatureBatch, best: Tensor, head: Linear, target_ids: Tensor, dtype: torch.dtype) -> Truth:
        """Where the best tokens are known, no logit outside the draft vocabulary is needed."""
        place = torch.full((head.weight.shape[0],), -1, dtype=torch.int64, device=target_ids.device)
        place[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
        logits = F.linear(found.last.flatten(0, 1), head.weight[target_ids].to(found.last.dtype))
        return cls._of(found, logits.to(dtype).softmax(-1), place[best], place[found.batch.ids[:, 1:]])

    def rows(self, step: int, entries: Tensor, *, of_text: bool = False) -> tuple[Tensor, Tensor]:
        """Which of a step's ``entries`` (C,) count, and where their truth lies: (R,) into B * C and into B * T.

        Entry i of step s guesses the token at i + 2 + s, of which position i + 1 + s knows. ``of_text``: those alone
        whose token in the text is in the draft vocabulary.
        """
        length = self.counts.shape[1]
        known = entries + 1 + step
        inside = known + 1 < length
        known = known.clamp(max=length - 2)
        keep = inside & self.counts[:, known + 1] & (self.best[:, known] >= 0)
        if of_text:
            keep &= self.after.view(self.counts.shape)[:, known] >= 0
        row, place = keep.nonzero(as_tuple=True)
        return row * len(entries) + place, row * length + known[place]


@dataclass(frozen=True, eq=False)
class Teacher:
    """Whose words a net is to guess.

    Attributes:
        head: the target's LM head, plain (not prepacked).
        target_ids: (V,) ascending: what losses look at: a net's draft vocabulary, if it has one; None: all tokens.
    """

    head: Linear
    target_ids: Tensor | None = None

    def truth(self, found: FeatureBatch, dtype: torch.dtype) -> Truth:
        """What it says of a batch."""
        return Truth.of(found, self.head, self.target_ids, dtype)


class ScoredStep(Protocol):
    """One drafted token after every entry: ``nets.unroll.UnrollStep``, or what a loss of its own has in its place.

    Attributes:
        index: of the token, from 0.
        entries: (C,) which entries of every row these are.
        read: (B * C, H) from which ``Scorer.logits`` makes its guesses.
    """

    @property
    def index(self) -> int: ...
    @property
    def entries(self) -> Tensor: ...
    @property
    def read(self) -> Tensor: ...


class Scorer(Protocol):
    """What is asked of a loss beside the sums: its net's guesses, for whoever weighs them otherwise."""

    @property
    def net(self) -> DraftNet: ...

    def steps(self, found: FeatureBatch, num_steps: int) -> Iterator[ScoredStep]:
        """The first ``num_steps`` tokens drafted after every position, or fewer; without noise."""
        ...

    def logits(self, index: int, read: Tensor) -> Tensor:
        """(R, V) over the target's tokens from what a step's entries read, (R, H)."""
        ...


class UnrolledLoss(nn.Module):
    """``net`` under an objective; a module, so that data-parallel wrappers see its forward.

    Args:
        net: in training.
        objective: see ``OBJECTIVES``.
        num_steps: of the unroll.
        noise, later_share: see ``unroll``; not in evaluation.
        target_ids: of ``Teacher``: what the losses of a net without a draft vocabulary look at.

    Raises:
        ConfigError: a net whose own LM head has a bias.
    """

    def __init__(
        self,
        net: DraftNet,
        objective: Objective,
        num_steps: int,
        noise: float = 0.0,
        later_share: float = 1.0,
        target_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        if net.head is not None and net.head.bias is not None:
            raise ConfigError(
                f"a net of kind {net.kind!r} has an LM head with a bias, which training would leave as it is: make the "
                f"head without one"
            )
        self.net, self.objective, self.num_steps = net, objective, num_steps
        self.noise, self.later_share = noise, later_share
        self._narrowed = target_ids if net.target_ids is None else None

    def forward(self, found: FeatureBatch, truth: Truth, *, agreement: bool = False) -> list[StepSums]:
        """Sums for every step.

        Args:
            agreement: count too how often the net's best token is the target's.
        """
        narrow = product_dtype(found.features, self.net.dtype)
        weight = self.net.head_weight if self._narrowed is None else self.net.head_weight[self._narrowed]
        features = found.features.to(self.net.dtype)
        noise, share = (self.noise, self.later_share) if self.training else (0.0, 1.0)
        sums = []
        for step in unroll(self.net, found.batch.ids, features, self.num_steps, noise, share):
            entries, where = truth.rows(step.index, step.entries, of_text=self.objective.of_text)
            read = step.read[entries]
            scored = step_sums(read, weight, truth, where, self.objective, narrow, agreement=agreement)
            if self.objective.feature_weight:
                regression = feature_loss(step.states[entries], truth.last[where]).sum()
                scored = replace(scored, loss=scored.loss + self.objective.feature_weight * regression)
            sums.append(scored)
        return sums

    def steps(self, found: FeatureBatch, num_steps: int) -> Iterator[UnrollStep]:
        return unroll(self.net, found.batch.ids, found.features.to(self.net.dtype), num_steps)

    def logits(self, index: int, read: Tensor) -> Tensor:
        found: Tensor = self.net.logits(read)
        return found


def loss_of(net: DraftNet, *said: Any) -> Any:
    """What an update minimises: the loss of the net's kind, or ``UnrolledLoss``; ``said``: its further arguments."""
    return (method_of_net(net).loss or UnrolledLoss)(net, *said)
