"""The cost model beside the clock: what the papers' formulas say of chains on this machine, and what is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftwing.budget.costs import (
    Costs,
    best_gamma,
    expected_tokens,
    inflection_length,
    memory_factor,
    operations_factor,
    predicted_speedup,
)
from draftwing.errors import ConfigError
from draftwing.lab.compare import compare
from draftwing.lm import LM
from draftwing.methods.base import Budget
from draftwing.sampling import Sampling
from draftwing.text.prompts import Prompt


@dataclass(frozen=True)
class Prediction:
    """Chains of one length.

    Attributes:
        gamma: tokens drafted in a step.
        tau_predicted, tau: (1 - alpha^(gamma + 1)) / (1 - alpha), and measured.
        paper: speedup by Leviathan et al.: verification as cheap as plain decoding.
        measured_costs: speedup by the measured times of both parts (MagicDec's form).
        speedup: measured.
        operations, memory: arithmetic and reads of the target's weights per token, of plain decoding's.
        inflection: tokens of context from which such chains gain; None where they never do.
    """

    gamma: int
    tau_predicted: float
    tau: float
    paper: float
    measured_costs: float
    speedup: float
    operations: float
    memory: float
    inflection: float | None


@dataclass(frozen=True)
class Predictions:
    """What ``predict`` found.

    Attributes:
        alpha: acceptance of a drafted token over all prompts. ``c``: a draft step / a target forward.
        pays: whether alpha > c. ``best_gamma``: by the paper's formula.
        auto: measured speedup where the budget decides by itself, and its tau.
    """

    drafter: str
    alpha: float
    c: float
    pays: bool
    best_gamma: int
    chains: list[Prediction]
    auto: dict[str, float]
    plain_tokens_per_s: float
    costs: dict[str, Any]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def predict(
    lm: LM,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    gammas: Sequence[int] = (1, 2, 3, 5, 8),
    on_progress: Callable[[int, int], None] | None = None,
) -> Predictions:
    """Formulas and measurements for chains of each length, and for the automatic budget.

    Raises:
        ConfigError: there is no drafter.
    """
    if not lm.drafter.drafts:
        raise ConfigError("there is nothing to predict without a drafter: give one with --draft")

    def with_budget(budget: Budget | None) -> LM:
        return LM(lm.target, lm.tokenizer, lm.new_drafter, lm.rule, budget, lossless=lm.lossless)

    costs = lm.costs()
    plain = LM(lm.target, lm.tokenizer)
    lms = [plain, *(with_budget(Budget(gamma)) for gamma in gammas), with_budget(None)]
    found = compare(lms, prompts, sampling, on_progress=on_progress)
    base, *chains, auto = found.methods
    longest = chains[-1]
    alpha = min(_pooled(longest.alpha), 1.0)
    # Weights that a draft step multiplies with, of those that a target forward does; 0 for lookup.
    c, ratio = costs.c, lm.drafter.num_bytes / lm.target.num_weight_bytes
    return Predictions(
        drafter=lm.drafter_name,
        alpha=alpha,
        c=c,
        pays=alpha > c,
        best_gamma=best_gamma(alpha, c),
        chains=[
            Prediction(
                gamma=gamma,
                tau_predicted=expected_tokens(alpha, gamma),
                tau=method.tau,
                paper=predicted_speedup(alpha, gamma, c),
                measured_costs=costs.speedup(alpha, gamma),
                speedup=method.speedup,
                operations=operations_factor(alpha, gamma, ratio),
                memory=memory_factor(alpha, gamma),
                inflection=_finite(inflection_length(costs, alpha, gamma)),
            )
            for gamma, method in zip(gammas, chains, strict=True)
        ],
        auto={"speedup": auto.speedup, "tau": auto.tau},
        plain_tokens_per_s=base.tokens_per_s,
        costs=costs.to_dict(),
        machine=found.machine,
    )


def describe_costs(costs: Costs) -> dict[str, Any]:
    """The measured costs in a few lines."""
    plain = costs.verify_seconds(1)
    nodes = [int(count) for count, _ in costs.verify.knots if count > 1]
    values: dict[str, Any] = {"plain_step_ms": round(1e3 * plain, 2)}
    values["verify_of_plain"] = "  ".join(f"{n}: {costs.verify_seconds(n) / plain:.2f}" for n in nodes)
    if costs.chain.knots:
        values["draft_step_of_plain"] = round(costs.c, 3)
    values["us_per_token_of_context"] = round(1e6 * costs.per_token, 2)
    return values


def _pooled(alpha: Sequence[float]) -> float:
    """One acceptance from those by depth, each weighed by how often its depth was reached."""
    reached, taken, weight = 0.0, 0.0, 1.0
    for each in alpha:
        reached += weight
        weight *= each
        taken += weight
    return taken / reached if reached else 0.0


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
