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
Shape suffixes: R rows (entries), H hidden, V draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.errors import ConfigError, shown

# logits (R, V), p (R, V) -> (R,); for an objective that is ``of_text``, the next token's id (R, 1) instead of p
Divergence = Callable[[Tensor, Tensor], Tensor]
CHUNK = {"cpu": 64}  # rows whose logits fit in the processor's cache; ``GPU_CHUNK`` on other devices
GPU_CHUNK = 4096


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """- sum p log q."""
    return logits.logsumexp(-1) - (probs * logits).sum(-1)


def top_k(logits: Tensor, probs: Tensor, num_best: int = 10) -> Tensor:
    """The cross-entropy over the target's ``num_best`` tokens only (HASS)."""
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
    """KL(q || p), which penalises mass of q where p has none. A p of 0 counts as the smallest normal number."""
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
    """Smooth L1, the mean over H: (R, H), (R, H) -> (R,)."""
    return F.smooth_l1_loss(_wide(states), _wide(features), reduction="none").mean(-1)


@dataclass(frozen=True)
class Objective:
    """A loss for one entry: ``feature_weight * feature_loss + sum of weight * divergence``.

    Attributes:
        divergences: (weight, function) of p and q.
        feature_weight: of the regression onto the target's features; 0 for none.
        decay: weight of step s is ``decay ** s``.
        of_text: the divergences compare with the data's next token instead of p.
    """

    divergences: tuple[tuple[float, Divergence], ...]
    feature_weight: float = 0.0
    decay: float = 1.0
    of_text: bool = False

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
    """The LM head's inputs of one step: a ``train.loss.ScoredStep``."""

    index: int
    entries: Tensor
    read: Tensor


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
    """Return one of ``OBJECTIVES``, or ``jsd:BETA`` with a beta between 0 and 1.

    Raises:
        ConfigError: unknown name.
    """
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


class TruthLike(Protocol):
    """The target's predictions for a batch: ``train.loss.Truth``."""

    @property
    def probs(self) -> Tensor:
        """(B * T, V) p."""
        ...

    @property
    def best(self) -> Tensor:
        """(B, T) the target's best tokens."""
        ...

    @property
    def after(self) -> Tensor:
        """(B * T, 1) the data's next tokens."""
        ...

    def rows(self, step: int, entries: Tensor, *, of_text: bool = False) -> tuple[Tensor, Tensor]:
        """Return indices of the entries (C,) of a step that count, into B * C, and of their truth, into B * T."""
        ...


def known_positions(truth: TruthLike, length: int, device: torch.device, *, of_text: bool) -> Tensor:
    """Return (R,) indices into B * T of the positions whose next token counts, for networks that predict all of them.

    In ``rows``, entry 0 predicts the token at 2, as in an unroll: position i is entry i - 1.
    """
    return truth.rows(0, torch.arange(-1, length - 2, device=device), of_text=of_text)[1]


def step_sums(
    read: Tensor,
    weight: Tensor,
    truth: TruthLike,
    where: Tensor,
    objective: Objective,
    dtype: torch.dtype,
    *,
    agreement: bool = False,
) -> StepSums:
    """Return one step's sums over R entries, without the feature loss.

    Args:
        read: (R, H) the LM head's input; ``weight``: (V, H) its matrix.
        truth: used at the indices ``where`` (R,) into B * T.
        dtype: of the matrix products, see ``product_dtype``.
        agreement: also count how often the best token is the target's.
    """
    labels = truth.after if objective.of_text else truth.probs
    loss = head_loss(read, weight, labels, where, objective.divergence, dtype)
    agreed = _num_agreed(read, weight, truth.best, where, dtype) if agreement else None
    return StepSums(loss, len(where), agreed)


def product_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type of products with the LM head: that of an active autocast on the device, else ``dtype``."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


@torch.no_grad()
def _num_agreed(read: Tensor, weight: Tensor, best: Tensor, where: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the entries of ``read`` (R, H) that predict the target's best token, ``best`` (B, T) at ``where`` (R,)."""
    guess = (read.to(dtype) @ weight.to(dtype).T).argmax(-1)
    return (guess == best.flatten()[where]).sum()


def head_loss(
    read: Tensor, weight: Tensor, probs: Tensor, rows: Tensor, divergence: Divergence, dtype: torch.dtype
) -> Tensor:
    """Return the sum over R of the divergence between softmax(read @ weight.T) and ``probs[rows]``.

    Logits and their gradients exist for a few rows at a time: whole, their memory traffic would dominate a training
    update on a CPU, and they would be the largest tensors on a GPU.

    Args:
        read: (R, H).
        weight: (V, H); gets a gradient if it requires one.
        probs: (S, V) p, or the divergence's other argument, used at ``rows`` (R,).
        dtype: of the matrix products.

    Returns:
        A scalar, float32 or wider.
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


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()
