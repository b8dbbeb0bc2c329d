"""Trees that a net grows: how one is asked for, and how it grows level by level where one call cannot do it.

Shape suffixes: B rows, W entries, N nodes, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from torch import Tensor

from draftwing.run.request import Ahead, Drafted, DraftRequest
from draftwing.sampling import SamplingBatch
from draftwing.tree import DraftTree

__all__ = ["Asked", "Grows", "Over", "grow"]


class Grows(Protocol):
    """A tree under construction: see ``drafters.growing.growth``."""

    first: int

    @property
    def done(self) -> bool:
        """Whether it is as deep as it shall be."""
        ...

    def extend(self, logits: Tensor) -> None:
        """Choose the next level from the logits (B, W, V) after the newest nodes."""
        ...

    def drafted(self) -> DraftTree:
        """What is to be run, from node ``first`` on."""
        ...

    def finish(self) -> Drafted:
        """The tree to verify."""
        ...


class Over(Protocol):
    """Begins to grow a tree over static inputs."""

    def __call__(self, pending: Tensor, wanted: Tensor, sampling: SamplingBatch) -> Grows:
        """(B,) roots, (B, 1) which rows are wanted, and a sampling of the same kind."""
        ...


class Asked(Protocol):
    """A tree that is asked for: see ``drafters.growing.asked``."""

    @property
    def sampling(self) -> SamplingBatch:
        """The rows'."""
        ...

    @property
    def wanted(self) -> Sequence[bool]:
        """Of each row whether anything is drafted for it."""
        ...

    @property
    def roots(self) -> Sequence[int]:
        """Of each row its pending token."""
        ...

    @property
    def starts(self) -> Sequence[int]:
        """Of each row the absolute position of the token after the root."""
        ...

    @property
    def depth(self) -> int:
        """Levels at most."""
        ...

    @property
    def ahead(self) -> Ahead | None:
        """What verifies the finished trees, where that may be done at once: nothing else is made of them before."""
        ...

    @property
    def is_keyed(self) -> bool:
        """Whether children are chosen under the target's noise."""
        ...

    def request(self) -> DraftRequest | None:
        """The same as numbers, for who grows it in one call; None where scores must be asked as it grows."""
        ...

    def growth(self) -> Grows:
        """To grow it level by level."""
        ...

    def key(self) -> Hashable | None:
        """What a recording of it depends on; None where it cannot be recorded."""
        ...

    def over(self) -> Over:
        """To grow its like over static inputs; knows nothing of the rows, which a recording outlives."""
        ...

    @property
    def most_nodes(self) -> int:
        """Nodes that may be run below the root."""
        ...


Step = Callable[[DraftTree, int, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]


def grow(growth: Grows, logits: Tensor, states: Tensor | None, step: Step, *, shifted: bool) -> Drafted:
    """Grow a tree level by level from the root's logits (B, 1, V) and state (B, 1, H).

    Args:
        step: runs a level: the tree, its first new node, the tokens (B, W) that its entries read, None for their own,
            and the states (B, W, H) -> logits (B, W, V) and the states that come out.
        shifted: an entry reads its own token, not the one before.
    """
    start = 0
    while True:
        growth.extend(logits)
        if growth.done:
            return growth.finish()
        tree, first = growth.drafted(), growth.first
        above = tree.parents[:, first:].clamp(min=start)  # an unused node may follow any
        ids = None if shifted else tree.tokens.gather(1, above)
        if states is not None:
            states = states.gather(1, (above - start)[:, :, None].expand(-1, -1, states.shape[2]))
        logits, states = step(tree, first, ids, states)
        start = first
