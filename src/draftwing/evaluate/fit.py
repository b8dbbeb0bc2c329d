"""Does a head fit its target? Acceptance on a few prompts, through the real decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwing.api import LM
from draftwing.stats import Stats
from draftwing.text.prompts import Prompt

__all__ = ["Fit", "measure_fit"]

# A head on the wrong target, tap or vocabulary agrees with it at the first token in a few cases of a hundred at
# most; the worst useful one in about a third.
MISFIT, WEAK = 0.15, 0.4


@dataclass(frozen=True)
class Fit:
    """What was measured.

    Attributes:
        tau: tokens emitted per target forward.
        alpha: acceptance at each depth, given that the depth was reached.
        verdict: ``fits``, ``weak`` or ``does not fit``.
    """

    tau: float
    alpha: tuple[float, ...]
    verdict: str


def measure_fit(lm: LM, prompts: Sequence[Prompt], max_tokens: int = 48) -> Fit:
    """Decode greedily and judge by the first drafted token."""
    found = lm.generate(prompts, max_tokens=max_tokens, ignore_eos=True)
    stats = Stats.sum(each.stats for each in found)
    first = stats.alpha[0] if stats.alpha else 0.0
    verdict = "does not fit" if first < MISFIT else "weak" if first < WEAK else "fits"
    return Fit(stats.tau, tuple(stats.alpha), verdict)
