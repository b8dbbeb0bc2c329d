"""How much to draft, from observed costs and acceptance; the constants of that, with unit and reason."""

from __future__ import annotations

from dataclasses import dataclass

from draftwing.methods.base import Budget

TREE = Budget(depth=14, width=4, nodes=63)


@dataclass(frozen=True)
class PlannerConfig:
    """Constants of the planner and of the measurements. Steps are decode steps: about 5 ms for SmolLM2 in int8."""

    # Bandit
    decay: float = 0.985  # share of an arm's past that each of its steps keeps: it remembers about 70 steps
    prior_weight: float = 4.0  # steps or observations that a prediction, or all earlier requests, count as
    prior_acceptance: float = 0.6  # acceptance of the first child before any is observed; trained drafters reach it
    exploration: float = 0.3  # width of the upper confidence bound of an arm played once, as a share of its speed
    min_gain: float = 1.04  # factor by which an arm must be faster to be worth a change: the first draft is slow
    warmup_steps: int = 2  # baseline steps before the first draft: the first step finds cold caches
    first_interval: int = 16  # steps between probes, doubled after each probe up to
    last_interval: int = 256  # this: a probe that loses the time of one step then costs 0.4%
    settling_steps: int = 3  # the baseline's first steps after drafts that do not count: caches are cold
    settling: float = 0.3  # share by which the first of them may be slower (22% measured), the second by half of it
    max_slowdown: float = 2.0  # cap of a step's time, in average steps of its arm: other processes interrupt some

    # Acceptance and trees
    acceptance_decay: float = 0.998  # share of the past that an observation keeps: about 500 nodes
    probability_bins: tuple[float, ...] = (  # limits: finer near 0 and 1, where most draft probabilities lie
        *(0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995),
    )
    learn_every: int = 16  # drafted steps between updates of the growth rule, each of which takes 0.5 ms
    tree: Budget = TREE  # largest tree: one node less than the largest measured forward
    scale_prior: float = 0.01  # weight of typical costs' slopes, in squared baseline steps: 4 bits double or halve them
    max_surprise: float = 1.3  # cap of a drafted step's time, in predicted ones, where a few steps change predictions

    # Measurements
    nodes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 16, 32, 64)  # nodes of target forwards: most trees are small
    depths: tuple[int, ...] = (1, 2, 4, 8)  # levels of drafts; as many depths have their own acceptance rates
    batches: tuple[tuple[int, int], ...] = ((1, 64), (4, 64), (1, 1024))  # rows and tokens: baseline, batch, long row
    rounds: int = 24  # at most; the first one is a warm-up
    seconds: float = 4.0  # for all of it


CONFIG = PlannerConfig()
