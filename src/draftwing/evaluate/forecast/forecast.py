"""Tau and speedup of a head for trees and a machine, before anything is decoded; and beside what is then measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftwing.budget.clock import Clock
from draftwing.budget.costs import Costs
from draftwing.drafters.base import Budget
from draftwing.drafters.growing.shapes import Shape
from draftwing.errors import ConfigError
from draftwing.evaluate.compare import compare
from draftwing.evaluate.forecast.held_out import THRESHOLDS, HeldOut
from draftwing.evaluate.forecast.replay import Walk, walk, walk_above
from draftwing.lm import LM
from draftwing.sampling import Sampling
from draftwing.text.prompts import Prompt

__all__ = ["Forecast", "forecast", "measured"]


@dataclass(frozen=True)
class Forecast:
    """Of one tree at one temperature.

    Attributes:
        tree: as the user named it; ``auto`` is the automatic budget, which is only approximated.
        tau: tokens emitted per target forward; ``tau_low`` and ``tau_high`` its 95% interval, by bootstrap over texts.
        nodes, levels: of a step in the mean.
        speedup: over plain decoding on a machine whose costs are known, at batch 1; None without.
        measured_tau, measured_speedup: None where nothing was decoded.
    """

    tree: str
    temperature: float
    tau: float
    tau_low: float
    tau_high: float
    nodes: float
    levels: float
    speedup: float | None = None
    measured_tau: float | None = None
    measured_speedup: float | None = None

    @property
    def error(self) -> float | None:
        """Of tau: forecast over measured, minus 1."""
        return None if self.measured_tau is None else self.tau / self.measured_tau - 1

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "error": self.error}


def forecast(
    held_out: HeldOut,
    trees: Mapping[str, Budget | None],
    temperatures: Sequence[float],
    costs: Costs | None = None,
) -> list[Forecast]:
    """Every tree at every temperature.

    Args:
        trees: by name; None is the automatic budget.
        costs: of the machine, where speedups are wanted.

    Raises:
        ConfigError: a temperature or a tree that the statistics do not cover, or the automatic budget without costs.
    """
    found = []
    for temperature in temperatures:
        texts = held_out.of(temperature)
        for name, budget in trees.items():
            if budget is not None:
                way = walk(texts, budget)
                speedup = None if costs is None else _speedup(way, _effort(budget, costs), costs, held_out.context)
            elif costs is None:
                raise ConfigError("what the automatic budget drafts follows from a machine's costs: name trees instead")
            else:
                ways = [walk_above(texts, place) for place in range(len(THRESHOLDS))]
                each = [_speedup(one, one.levels, costs, held_out.context) for one in ways]
                speedup = max(each)
                way = ways[each.index(speedup)]
            low, high = way.interval()
            found.append(Forecast(name, temperature, way.tau, low, high, way.nodes, way.levels, speedup))
    return found


def measured(
    forecasts: Sequence[Forecast],
    lm: LM,
    trees: Mapping[str, Budget | None],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Forecast]:
    """The same with what decoding the prompts gives, each prompt with every tree in turn; see ``compare``.

    Args:
        sampling: how texts are written, but for the temperature.
    """
    plain = LM(lm.target, lm.tokenizer)
    lms = [plain, *(LM(lm.target, lm.tokenizer, lm.new_drafter, lm.rule, budget) for budget in trees.values())]
    temperatures = list(dict.fromkeys(each.temperature for each in forecasts))
    known: dict[tuple[str, float], tuple[float, float]] = {}
    for number, temperature in enumerate(temperatures):

        def tell(done: int, total: int, before: int = number) -> None:
            if on_progress is not None:
                on_progress(before * total + done, total * len(temperatures))

        _, *methods = compare(lms, prompts, replace(sampling, temperature=temperature), on_progress=tell).methods
        known |= {
            (name, temperature): (method.tau, method.speedup) for name, method in zip(trees, methods, strict=True)
        }
    return [
        replace(each, measured_tau=tau, measured_speedup=speedup)
        for each in forecasts
        for tau, speedup in [known[each.tree, each.temperature]]
    ]


def _speedup(way: Walk, effort: float, costs: Costs, context: float) -> float:
    """Over plain decoding: tokens of a step over what it takes, in plain steps."""
    plain = costs.verify_seconds(1, 1, context)
    # T_V of a whole number of nodes, and between two of them.
    low = int(way.nodes)
    verify = [costs.verify_seconds(low + 1 + more, 1, context) for more in (0, 1)]
    takes = verify[0] + (way.nodes - low) * (verify[1] - verify[0])
    return way.tau * plain / (takes + Clock(costs).draft(effort, 1))


def _effort(budget: Budget, costs: Costs) -> float:
    """Levels of drafting, those of several nodes counted as more (see ``DraftTree.effort``)."""
    share = Clock(costs).share
    if budget.paths is not None:
        widths = [1, *(len(level.expanded) for level in Shape.of(budget.paths).levels[:-1])]
        return sum(1 + (width - 1) * share for width in widths)
    return min(budget.depth, 1) + max(budget.depth - 1, 0) * (1 + (budget.width - 1) * share)
