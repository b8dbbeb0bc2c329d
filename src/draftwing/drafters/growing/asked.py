"""A tree that is asked for, from a budget: what drafters hand to whatever runs their nets.

Shape suffixes: B rows, N nodes, D depth.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from draftwing.drafters.base import Budget
from draftwing.drafters.growing.growth import Growth
from draftwing.model.target import Context
from draftwing.nets.calibration import Calibration
from draftwing.run.growing import Over
from draftwing.run.request import Adjustments, Ahead, DraftRequest
from draftwing.sampling import SamplingBatch

__all__ = ["Asked"]


@dataclass
class _Rows(Context):
    """The rows as far as a recording may know them: by the tensor of their pending tokens."""

    pending_ids: Tensor = None  # type: ignore[assignment]  # always given

    def pending(self) -> Tensor:
        return self.pending_ids


@dataclass(frozen=True)
class Asked:
    """A tree for every row: ``run.growing.Asked``.

    Attributes:
        ctx: the running rows.
        wanted: which of them are drafted for.
        sampling: theirs.
        budget: shape and size.
        calibration: how scores become chances at T > 0.
        wants_places: whether to say where in the slots each node was run.
    """

    ctx: Context
    wanted: Sequence[bool]
    sampling: SamplingBatch
    budget: Budget
    calibration: Calibration
    wants_places: bool = False

    @property
    def depth(self) -> int:
        """Levels at most."""
        return self.budget.depth

    @property
    def ahead(self) -> Ahead | None:
        """See ``run.growing.Asked``."""
        return self.ctx.ahead

    @property
    def is_keyed(self) -> bool:
        """Whether children are chosen under the target's noise."""
        return self.budget.children == "keyed"

    @property
    def roots(self) -> list[int]:
        """Of each row its pending token."""
        return [row.tokens[row.length] for row in self.ctx.rows]

    @property
    def starts(self) -> list[int]:
        """Of each row the absolute position of the token after the root."""
        return [row.length + 1 for row in self.ctx.rows]

    @property
    def most_nodes(self) -> int:
        """Nodes that may be run below the root."""
        return len(self.budget.paths) if self.budget.paths else self.budget.width * self.budget.depth

    def request(self) -> DraftRequest | None:
        """The very trees of ``growth``; None where one call cannot grow them."""
        budget, sampling, rows = self.budget, self.sampling, self.ctx.rows
        depth, rule, handle = budget.depth, budget.rule, sampling.noise.handle
        most = depth if budget.width == 1 else budget.nodes
        if most is not None and rule is not None:  # no further than its tables reach
            depth, most = min(depth, len(rule.gains)), min(most, len(rule.verify) - 3)
        if budget.paths or budget.children not in ("keyed", "top") or most is None or depth < 1:
            return None
        if handle is None:
            return None
        seeds = sampling.drawing_seeds if budget.children == "keyed" else [-1] * len(rows)
        return DraftRequest(
            depth,
            budget.width,
            most,
            [row.tokens[row.length] for row in rows],
            self.wanted,
            *sampling.all_filters,
            handle,
            seeds,
            [row.length + 1 for row in rows],
            self.calibration.sharpness,
            self.calibration.miss,
            self.calibration.scale,
            self._adjustments() if sampling.adjusts else None,
            rule,
        )

    def _adjustments(self) -> Adjustments:
        """Penalties and biases of the rows."""
        requests, rows = self.sampling.rows, self.ctx.rows
        return Adjustments(
            [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in requests],
            [row.tokens[: row.length] if each.penalises else [] for row, each in zip(rows, requests, strict=True)],
            [row.prompt_length for row in rows],
            self.sampling.token_biases,
        )

    def growth(self) -> Growth:
        """See ``run.growing.Asked``."""
        return Growth(
            self.ctx, self.wanted, self.sampling, self.budget, self.calibration, wants_places=self.wants_places
        )

    def over(self) -> Over:
        """See ``run.growing.Asked``."""
        budget, calibration, wants_places = self.budget, self.calibration, self.wants_places

        def growth(pending: Tensor, wanted: Tensor, sampling: SamplingBatch) -> Growth:
            ctx = _Rows(pending.device, pending_ids=pending)
            return Growth(ctx, wanted, sampling, budget, calibration, wants_places=wants_places)

        return growth

    def key(self) -> Hashable | None:
        """See ``run.growing.Asked``.

        Nothing is recorded where the host decides as it grows, nor where scores look at more than temperatures: top-p
        asks the device how far it has to sort, penalties read a history that grows, and q is kept for the classic
        rules alone.
        """
        sampling, budget = self.sampling, self.budget
        if budget.rule is not None or budget.children not in ("keyed", "top") or not sampling.only_temperature:
            return None
        # What the scores' code looks at on the host, and nothing else of a request.
        return budget, sampling.all_greedy, sampling.num_greedy > 0, sampling.scales

    def within(self, depth: int) -> Asked:
        """The same, no deeper than ``depth``: where a net's context ends."""
        if depth >= self.depth:
            return self
        paths = self.budget.paths
        if paths is None:
            return replace(self, budget=replace(self.budget, depth=depth))
        return replace(self, budget=replace(self.budget, paths=tuple(path for path in paths if len(path) <= depth)))
