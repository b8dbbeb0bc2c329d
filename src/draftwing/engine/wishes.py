"""What a request may wish for beside its sampling, checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence

from draftwing.constraint import Constraint
from draftwing.drafters.base import Drafter
from draftwing.errors import ConfigError, shown
from draftwing.sampling import Sampling

__all__ = ["check_constraint", "checked_drafts", "names_of"]


def names_of(drafter: Drafter) -> tuple[str, ...]:
    """The names by which requests choose among drafts; an only one goes by its kind too."""
    return drafter.traits.parts or tuple(dict.fromkeys((drafter.name.split(" ")[0], drafter.name)))


def check_constraint(constraint: object, sampling: Sampling) -> None:
    """Raise ConfigError where a text cannot be held to it."""
    if not isinstance(constraint, Constraint):
        raise ConfigError(
            f"constraint must have a start() that gives a state, found {shown(constraint)}: give a grammar as "
            f"LM.constraint(...) makes it"
        )
    if sampling.ignore_eos:
        raise ConfigError(
            "a text under a constraint ends with an end token where it is complete, and ignore_eos would go on: leave "
            "one of them out"
        )


def checked_drafts(drafts: object, known: Sequence[str]) -> tuple[str, ...]:
    """The names of drafts that a request chooses. Raises ConfigError where one is not there."""
    if isinstance(drafts, str) or not isinstance(drafts, Sequence | set | frozenset):
        raise ConfigError(f"drafts must be a list of names, found {shown(drafts)}: write [{drafts!r:.60}]")
    for name in drafts:
        if name not in known:
            raise ConfigError(
                f"drafts: {shown(name)} is not loaded: choose among {', '.join(known)}, or load the model with "
                f"draft='... + ...'"
            )
    return tuple(drafts)
