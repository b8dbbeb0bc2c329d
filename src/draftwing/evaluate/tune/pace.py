"""What drafting with any set of a target's layers takes on this machine, from a handful of measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from draftwing.budget.measure import costs_of
from draftwing.drafters.base import Drafter
from draftwing.drafters.sublayers import SubLayersDrafter
from draftwing.engine.decode import loop_of
from draftwing.errors import ConfigError
from draftwing.model.lean import LeanTarget
from draftwing.model.subnet import Parts, SubNet

__all__ = ["MOST_DEPTH", "Pace", "measure_pace"]

MOST_DEPTH = 12  # of the chains that are weighed


@dataclass(frozen=True)
class Pace:
    """Seconds.

    Attributes:
        start: of a draft, whatever its depth.
        base: of each of its passes beside the layers: embedding, norm, LM head, choosing a token.
        attention, mlp: of each layer's part in a pass.
        verify: of the target's forward over 1, 2, ... nodes, with all that comes after it.
    """

    start: float
    base: float
    attention: float
    mlp: float
    verify: tuple[float, ...]

    def tokens_per_s(self, parts: Parts, accepted: Sequence[float]) -> tuple[float, int]:
        """Of the best chain: its tokens a second, and its length, 1 at least.

        Args:
            accepted: how often the first token of a chain is accepted, the first two, ...; each further token as often
                as the last of these, given those before it.
        """
        each = self.base + len(parts.attention) * self.attention + len(parts.mlp) * self.mlp
        reached, tokens, found = 1.0, 1.0, []
        for depth in range(1, len(self.verify)):
            if depth <= len(accepted):
                reached = accepted[depth - 1]
            else:
                before = accepted[-2] if len(accepted) > 1 else 1.0
                reached *= accepted[-1] / before if before else 0.0
            tokens += reached
            found.append((tokens / (self.start + depth * each + self.verify[depth]), depth))
        return max(found)

    @property
    def plain(self) -> float:
        """Tokens a second without drafts."""
        return 1 / self.verify[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Pace:
        """What ``to_dict`` gave.

        Raises:
            ConfigError: something else.
        """
        try:
            numbers = {name: float(values[name]) for name in ("start", "base", "attention", "mlp")}
            verify = tuple(map(float, values["verify"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are no measured times ({error!r}): measure again") from error
        return cls(verify=verify, **numbers)


def measure_pace(target: LeanTarget, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Pace:
    """From a target's costs with all of its layers drafting, without their attentions, and without their MLPs.

    Args:
        on_progress: called with the sets measured, and how many there are.
    """
    count, every = target.num_layers, tuple(range(target.num_layers))
    sets = [Parts.without(count, (), ()), Parts.without(count, every, ()), Parts.without(count, (), every)]
    costs = []
    for number, parts in enumerate(sets):
        on_progress(number, len(sets))
        new: Callable[[], Drafter] = partial(SubLayersDrafter, SubNet(target.net, parts), target, "layers")
        costs.append(costs_of(target, new, loop_of(target)))
    on_progress(len(sets), len(sets))
    whole, no_attention, no_mlp = (each.c * each.verify(1) for each in costs)
    verify = costs[0].verify
    return Pace(
        start=max(costs[0].chain(1) - whole, 0.0),
        base=max(no_attention + no_mlp - whole, 0.0),
        attention=max(whole - no_attention, 0.0) / count,
        mlp=max(whole - no_mlp, 0.0) / count,
        verify=tuple(verify(nodes) for nodes in range(1, MOST_DEPTH + 2)),
    )
