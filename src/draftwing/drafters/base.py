"""What a drafter is: it watches a context and proposes a tree for every row.

Shape suffixes: B rows, N nodes, T tokens, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.model.target import NO_FEATURES, Context, FeatureSpec, TargetOutput
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

__all__ = ["Budget", "Drafter", "NoDrafter"]


@dataclass(frozen=True)
class Budget:
    """How much to draft in one step.

    Attributes:
        depth: tokens on the longest path, the root not counted.
        width: nodes on each level (for lookup: paths); 1 is a chain.
        children: how children are chosen, from the rule: ``keyed``, ``sampled`` or ``distinct``.

    Raises:
        ConfigError: depth below 0 or width below 1.
    """

    depth: int = 5
    width: int = 1
    children: str = "keyed"

    def __post_init__(self) -> None:
        if self.depth < 0 or self.width < 1:
            raise ConfigError(f"a budget needs depth >= 0 and width >= 1, found depth {self.depth}, width {self.width}")


class Drafter(Protocol):
    """Proposes trees. It keeps a state per row, in the order of ``ctx.rows``.

    Attributes:
        name: for reports.
        features: the target's hidden states that it reads.
    """

    name: str
    features: FeatureSpec

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """A row was added at the end of ``ctx.rows``; ``features`` (1, T - 1, F) of its prompt."""
        ...

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """A tree per row whose roots are the pending tokens. May look at nothing that the target has not emitted."""
        ...

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """What became of the tree. ``ctx.rows`` still shows the state before the step."""
        ...

    def remove(self, ctx: Context, row: int) -> None:
        """A row left; the last row takes its place. Called before ``ctx.rows`` changes."""
        ...


class NoDrafter:
    """Drafts nothing: ordinary decoding, the baseline of every speedup."""

    name = "none"
    features = NO_FEATURES

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Nothing to keep."""

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Lone roots."""
        return DraftTree.root(ctx.pending())

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Nothing to learn."""

    def remove(self, ctx: Context, row: int) -> None:
        """Nothing to drop."""
