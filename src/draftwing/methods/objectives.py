"""Training objectives of draft networks, for every step of an unroll.

    eagle1   Smooth L1 between predicted and true features, + 0.1 soft cross-entropy        (2401.15077)
    hass     eagle1 + top-K distillation: cross-entropy over the target's K best tokens      (2408.15766)
    eagle3   soft cross-entropy on the draft vocabulary, no feature loss                     (2503.01840)
    medusa   soft cross-entropy of every head, the k-th weighted 0.8^k                       (2401.10774)
    dflash   soft cross-entropy of every place of a block, the k-th weighted exp(-(k-1)/4)   (2602.06036, block of 8)
    tv       total variation, 1 - sum min(p, q): how often speculative sampling rejects   (DistillSpec 2310.08461)
    fkl, rkl forward and reverse Kullback-Leibler, KL(p || q) and KL(q || p)                  (DistillSpec)
    jsd      generalised Jensen-Shannon, beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q:
             beta is 0.5, or BETA in ``jsd:BETA``                                             (GKD 2306.13649)

    next-token   cross-entropy of the data's next token, not of the target's prediction       (MTP, 2412.19437)

Masked entries are excluded from every mean. p = target, q = draft.
Shape suffixes: B rows, T tokens, C entries of a row, R entries that count, H hidden, V draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.errors import ConfigError, shown
from draftwing.methods.net import DraftNet, Scored
from draftwing.models.attention import CausalAttention
from draftwing.models.linear import Linear

# logits (R, V), p (R, V) -> (R,); an objective that is ``of_text`` gets the next token's id (R, 1) instead of p
Divergence = Callable[[Tensor, Tensor], Tensor]
CHUNK = {"cpu": 64}  # rows whose logits fit in the processor's cache; ``GPU_CHUNK`` on other devices
GPU_CHUNK = 4096


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """- sum p log q."""
    return logits.logsumexp(-1) - (probs * logits).sum(-1)


def top_k(logits: Tensor, probs: Tensor, num_best: int = 10) -> Tensor:
    """Cross-entropy over the target's ``num_best`` tokens only (HASS)."""
    best = probs.topk(min(num_best, probs.shape[-1]), dim=-1)
    return (best.values * (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, best.indices))).sum(-1)


def tv(logits: Tensor, probs: Tensor) -> Tensor:
    """1 - sum min(p, q), in [0, 1]."""
    return 1 - torch.minimum(probs, logits.softmax(-1)).sum(-1)


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """- log q of one token: ids (R, 1) of any dtype."""
    return F.cross_entropy(logits, ids[:, 0].long(), reduction="none")


def forward_kl(logits: Tensor, probs: Tensor) -> Tensor:
    """KL(p || q): the soft cross-entropy minus the entropy of p, so that 0 is perfect."""
    entropy: Tensor = torch.special.entr(probs).sum(-1)
    return soft_cross_entropy(logits, probs) - entropy


def reverse_kl(logits: Tensor, probs: Tensor) -> Tensor:
    """KL(q || p), which penalises q for tokens that p excludes; a p of 0 counts as the smallest normal number."""
    log_q = logits.log_softmax(-1)
    return (log_q.exp() * (log_q - _log(probs))).sum(-1)


def jensen_shannon(logits: Tensor, probs: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, which is bounded."""
    log_q = logits.log_softmax(-1)
    q = log_q.exp()
    log_m = _log(beta * probs + (1 - beta) * q)
    of_p: Tensor = -torch.special.entr(probs) - probs * log_m
    of_q = q * (log_q - log_m)
    return (beta * of_p + (1 - beta) * of_q).sum(-1)


def _log(probs: Tensor) -> Tensor:
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def feature_loss(states: Tensor, features: Tensor) -> Tensor:
    """Smooth L1 in float32 or wider, the mean over H: (R, H), (R, H) -> (R,)."""
    wide = torch.promote_types(torch.promote_types(states.dtype, features.dtype), torch.float32)
    return F.smooth_l1_loss(states.to(wide), features.to(wide), reduction="none").mean(-1)


@dataclass(frozen=True)
class Objective:
    """A loss for one entry: ``feature_weight * feature_loss + sum of weight * divergence``."""

    divergences: tuple[tuple[float, Divergence], ...]  # (weight, function) of p and q
    feature_weight: float = 0.0  # weight of the regression onto the target's features; 0 for none
    decay: float = 1.0  # weight of step s is ``decay ** s``
    of_text: bool = False  # the divergences compare with the data's next token instead of p

    def divergence(self, logits: Tensor, probs: Tensor) -> Tensor:
        """(R, V), (R, V) -> (R,)."""
        parts = [weight * function(logits, probs) for weight, function in self.divergences]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, eq=False)
class StepSums:
    """Sums over the entries of one step: loss (with gradient), entries, and greedy agreements."""

    loss: Tensor
    count: int
    agreed: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StepGuesses:
    """The guesses of one step, for the token at i + 2 + ``index`` after entry i."""

    index: int  # number of the step, from 0
    entries: Tensor  # (C,) entries of every row
    read: Tensor  # (B * C, H) the LM head's input
    weight: Tensor | None = None  # (V, H) the LM head's matrix, if each step has another
    states: Tensor | None = None  # (B * C, H) to feed back, if the network is unrolled: for EAGLE-1 predicted features


OBJECTIVES: dict[str, Objective] = {
    "eagle1": Objective(((0.1, soft_cross_entropy),), feature_weight=1.0),
    "hass": Objective(((0.1, soft_cross_entropy), (1.0, top_k)), feature_weight=1.0),
    "eagle3": Objective(((1.0, soft_cross_entropy),), decay=0.8),
    "medusa": Objective(((1.0, soft_cross_entropy),), decay=0.8),
    "dflash": Objective(((1.0, soft_cross_entropy),), decay=math.exp(-1 / 4)),
    "tv": Objective(((1.0, tv),), decay=0.8),
    "next-token": Objective(((1.0, next_token),), of_text=True),
    "fkl": Objective(((1.0, forward_kl),), decay=0.8),
    "rkl": Objective(((1.0, reverse_kl),), decay=0.8),
    "jsd": Objective(((1.0, jensen_shannon),), decay=0.8),
}


def objective_named(name: object) -> Objective:
    """Return one of ``OBJECTIVES``, or ``jsd:BETA``. Raises ConfigError for an unknown name."""
    if isinstance(name, str):
        if name in OBJECTIVES:
            return OBJECTIVES[name]
        kind, _, number = name.partition(":")
        try:
            beta = float(number)
        except ValueError:
            beta = 0.0
        if kind == "jsd" and 0 < beta < 1:
            return Objective(((1.0, partial(jensen_shannon, beta=beta)),), decay=0.8)
    raise ConfigError(
        f"training: objective must be one of {', '.join(OBJECTIVES)}, or jsd:BETA with a BETA between 0 and 1, found "
        f"{shown(name)}"
    )


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
    def of(cls, scored: Scored, head: Linear, target_ids: Tensor | None, dtype: torch.dtype) -> Truth:
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


class DraftLoss(nn.Module):
    """Base class of losses: a network's guesses under an objective; a module, so data-parallel wrappers see a forward.

    Args:
        num_steps: draft steps.
        noise: width of the uniform noise that is added to the target's features in training (EAGLE-1: 0.2, that is
            +-0.1).
        later_share: share of the entries that are trained after the first step.
        target_ids: tokens that the loss looks at if the network has no draft vocabulary; None for all.
    """

    def __init__(
        self,
        net: DraftNet,
        objective: Objective,
        num_steps: int = 1,
        noise: float = 0.0,
        later_share: float = 1.0,
        target_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.net: Any = net
        self.objective, self.num_steps, self.noise, self.later_share = objective, num_steps, noise, later_share
        self._narrowed = target_ids if net.target_ids is None else None
        self.check()
        num_levels = getattr(net, "num_levels", None)
        if num_levels not in (None, num_steps):
            raise ConfigError(
                f"training: this {net.kind} head guesses {num_levels} tokens, and unroll_steps is {num_steps}: give "
                f"{num_levels}, or start from nothing"
            )

    def check(self) -> None:
        """Raise ConfigError if the network cannot be trained with these options."""
        if self.objective.feature_weight:
            raise ConfigError(
                f"training: a net of kind {self.net.kind!r} predicts no features, and the objective compares them: "
                f"choose --objective fkl, rkl, jsd or tv, or leave it out"
            )

    def forward(self, scored: Scored, truth: Truth, *, agreement: bool = False) -> list[StepSums]:
        """Return the sums of every step; with ``agreement``, also how often the best token is the target's."""
        dtype, shared_weight = product_dtype(scored.features, self.net.dtype), self.narrow(self.net.head_weight)
        sums = []
        for step in self.steps(scored, self.num_steps):
            weight = shared_weight if step.weight is None else self.narrow(step.weight)
            rows, where = truth.rows(step.index, step.entries, of_text=self.objective.of_text)
            read = step.read[rows]
            result = step_sums(read, weight, truth, where, self.objective, dtype, agreement=agreement)
            extra = self.extra_loss(read.detach(), weight.detach(), truth, where, dtype)
            if self.objective.feature_weight and step.states is not None:
                regression = feature_loss(step.states[rows], truth.last[where]).sum()
                extra = self.objective.feature_weight * regression
            sums.append(result if extra is None else replace(result, loss=result.loss + extra))
        return sums

    def extra_loss(
        self, read: Tensor, weight: Tensor, truth: Truth, where: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """Return a term that a network adds to a step's loss; see ``step_sums`` for the arguments."""
        return None

    def steps(self, scored: Scored, num_steps: int) -> Iterator[StepGuesses]:
        """Yield the guesses of the first ``num_steps`` steps, or fewer."""
        raise NotImplementedError

    def logits(self, index: int, read: Tensor) -> Tensor:
        """(R, H) read at step ``index`` -> (R, V) over the target's tokens."""
        logits: Tensor = self.net.logits(read)
        return logits

    def narrow(self, weight: Tensor) -> Tensor:
        """Return the rows of an LM head that the loss looks at."""
        return weight if self._narrowed is None else weight[self._narrowed]

    def noisy(self, scored: Scored, count: int | None = None) -> Tensor:
        """(B, T, F) the target's features, of the first ``count`` tokens, in the network's dtype; noisy in training."""
        features: Tensor = scored.features[:, :count].to(self.net.dtype)
        if self.noise and self.training:
            features = features + (scored.batch.rand(features.shape[1:], features) - 0.5) * self.noise
        return features


class AlignedLoss(DraftLoss):
    """The loss of a network that predicts the token after each entry, like the target, in one causal forward.

    Nothing is unrolled: the network reads the same in training as while drafting.
    """

    def check(self) -> None:
        super().check()
        if self.num_steps != 1 or self.later_share != 1:
            raise ConfigError(
                f"training: a net of kind {self.net.kind!r} learns one step from every position at once: leave "
                f"--unroll-steps and --later-share out"
            )

    def forward(self, scored: Scored, truth: Truth, *, agreement: bool = False) -> list[StepSums]:
        ids, of_text = scored.batch.ids, self.objective.of_text
        dtype, weight = product_dtype(ids, self.net.dtype), self.narrow(self.net.head_weight)
        # In ``rows``, entry 0 predicts the token at 2, as in an unroll: position i is entry i - 1.
        _, where = truth.rows(0, torch.arange(-1, ids.shape[1] - 2, device=ids.device), of_text=of_text)
        read = self._read(scored)[where]
        return [step_sums(read, weight, truth, where, self.objective, dtype, agreement=agreement)]

    def steps(self, scored: Scored, num_steps: int) -> Iterator[StepGuesses]:
        rows, length = scored.batch.ids.shape
        read = self._read(scored).view(rows, length, -1)[:, 1:-1]
        yield StepGuesses(0, torch.arange(length - 2, device=read.device), read.flatten(0, 1))

    def _read(self, scored: Scored) -> Tensor:
        """Return the LM head's input (B * T, H) after every token."""
        net, ids = self.net, scored.batch.ids
        rows, length = ids.shape
        shape, positions = net.shape, torch.arange(length, device=ids.device).repeat(rows)
        states = net.fuse(self.noisy(scored).flatten(0, 1)) if net.config.taps else None
        # Every text is read as one prompt, as the target reads it.
        cis = net.rotary.cis(positions, torch.full_like(positions, length), upto=length).view(rows * length, 1, -1)
        attend = CausalAttention(rows, length, shape.windows, max(shape.head_dim, 1) ** -0.5, cis)
        read: Tensor = net.forward(ids.flatten(), states, attend)[0]
        return read


def step_sums(
    read: Tensor,
    weight: Tensor,
    truth: Truth,
    where: Tensor,
    objective: Objective,
    dtype: torch.dtype,
    *,
    agreement: bool = False,
) -> StepSums:
    """Return one step's sums over R entries, without the feature loss; see ``head_loss`` for the arguments.

    ``truth`` is used at the indices ``where`` (R,) into B * T; ``agreement`` also counts how often the best token is
    the target's.
    """
    labels = truth.after if objective.of_text else truth.probs
    loss = head_loss(read, weight, labels, where, objective.divergence, dtype)
    if not agreement:
        return StepSums(loss, len(where))
    with torch.no_grad():
        best = (read.to(dtype) @ weight.to(dtype).T).argmax(-1)
        return StepSums(loss, len(where), (best == truth.best.flatten()[where]).sum())


def product_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of products with the LM head: that of an active autocast on the device, else ``dtype``."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


def head_loss(
    read: Tensor, weight: Tensor, probs: Tensor, rows: Tensor, divergence: Divergence, dtype: torch.dtype
) -> Tensor:
    """Return the sum over R of the divergence between softmax(read @ weight.T) and ``probs[rows]``, float32 or wider.

    Logits and their gradients exist for a few rows at a time: whole, their memory traffic would dominate a training
    update on a CPU, and they would be the largest tensors on a GPU.

    Args:
        read: (R, H); ``weight`` (V, H) gets a gradient if it requires one.
        probs: (S, V) p, or the divergence's other argument, used at ``rows`` (R,).
        dtype: that of the matrix products.
    """
    loss: Tensor = _HeadLoss.apply(read, weight, probs, rows, divergence, dtype)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    """Computes the gradients in the forward, chunk by chunk, in the memory of the logits."""

    @staticmethod
    def forward(
        ctx: Any, read: Tensor, weight: Tensor, probs: Tensor, rows: Tensor, divergence: Divergence, dtype: torch.dtype
    ) -> Tensor:
        device = read.device.type
        with torch.autocast(device, enabled=False):
            narrow, matrix = read.detach().to(dtype), weight.detach().to(dtype)
            logits = narrow @ matrix.T
            total = torch.zeros((), dtype=probs.dtype, device=read.device)
            chunk = CHUNK.get(device, GPU_CHUNK)
            for start in range(0, len(logits), chunk):
                piece = logits[start : start + chunk]
                wide = piece.to(probs.dtype, copy=True).requires_grad_()
                with torch.enable_grad():
                    loss = divergence(wide, probs[rows[start : start + chunk]]).sum()
                (gradient,) = torch.autograd.grad(loss, wide)
                piece.copy_(gradient)
                total += loss.detach()
            ctx.save_for_backward(
                (logits @ matrix).to(read.dtype), (logits.T @ narrow).to(weight.dtype) if weight.requires_grad else None
            )
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = outputs
        by_read, by_weight = ctx.saved_tensors
        return by_read * scale, None if by_weight is None else by_weight * scale, None, None, None, None
