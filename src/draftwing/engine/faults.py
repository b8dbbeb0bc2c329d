"""What goes wrong in drafters, which are there to save time alone: a text goes on without one that fails."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwing.engine.request import Request
from draftwing.errors import DraftwingWarning, shown

__all__ = ["MOST", "Faults"]

MOST = 3  # faults in a row after which a drafter is given up


@dataclass
class Faults:
    """Exceptions that drafters raised in a decode loop.

    Attributes:
        num: of them in all.
        last: the latest one.
        in_a_row: since the last step with drafts that went well.
    """

    num: int = 0
    last: Exception | None = None
    in_a_row: int = 0
    _refused: set[int] = field(default_factory=set)

    @property
    def is_hopeless(self) -> bool:
        """Whether to try no more drafters."""
        return self.in_a_row >= MOST

    def add(self, name: str, error: Exception, request: Request | None = None) -> None:
        """One more; it warns where that is one too many.

        Args:
            name: the drafter's.
            request: whose row it could not take; None where it failed in another way.
        """
        self.num, self.in_a_row, self.last = self.num + 1, self.in_a_row + 1, error
        if request is not None:
            self._refused.add(request.id)
        if self.is_hopeless:
            warnings.warn(
                f"{name} failed {self.in_a_row} times in a row, the last time with {type(error).__name__}: "
                f"{shown(str(error))}: from here on nothing is drafted, and texts are decoded plainly; load it anew, "
                f"or choose another draft",
                DraftwingWarning,
                stacklevel=2,
            )

    def may_try(self, running: Sequence[Request]) -> bool:
        """Whether a fresh drafter may take all that runs: not while a request is there that one could not take."""
        if self._refused:
            self._refused &= {request.id for request in running}
        return not self._refused
