"""Limits that a request may set besides its sampling, checked before any work is done, and those of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftwing.accept import Rule
from draftwing.budget.planner import Planner
from draftwing.constraint import Constraint
from draftwing.errors import ConfigError, shown
from draftwing.methods.base import MAX_NODES, Budget, Drafter
from draftwing.models.context import Context
from draftwing.sampling import Sampling
from draftwing.tree import DraftTree


@dataclass(frozen=True)
class AtMost:
    """A limit on a request's trees: the engine's own budget, with at most ``nodes`` nodes.

    Attributes:
        nodes: at least 1, the root not counted.

    Raises:
        ConfigError: no such number.
    """

    nodes: int

    def __post_init__(self) -> None:
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or not 1 <= self.nodes <= MAX_NODES:
            raise ConfigError(f"a tree has 1 to {MAX_NODES:,} nodes at most, found {shown(self.nodes)}: choose one")


def suited(budget: Budget, rule: Rule) -> Budget:
    """A budget as a rule needs it. Raises ConfigError for one that it cannot take."""
    if rule.chain_only and not budget.is_chain:
        raise ConfigError(f"rule {rule.name!r} takes chains, found width {budget.width}: use width 1 or 'match'")
    return replace(budget, children=rule.children)


def cut_to_nodes(budget: Budget, most: int) -> Budget:
    """Return ``budget`` with at most ``most`` nodes."""
    if budget.paths is not None:  # the shallow ones, parents first
        paths = sorted(budget.paths, key=lambda path: (len(path), path))[:most]
        return replace(budget, paths=tuple(paths)) if len(paths) < len(budget.paths) else budget
    depth, width = min(budget.depth, most), min(budget.width, most)
    if width == 1:
        return budget if depth == budget.depth else replace(budget, depth=depth, width=1, nodes=None)
    return replace(budget, depth=depth, width=width, nodes=min(budget.nodes or most, most))


def size_of(budget: Budget) -> int:
    """Nodes of a row's tree at most."""
    return len(budget.paths) if budget.paths else budget.nodes or budget.depth * budget.width


def widest(budgets: Sequence[Budget]) -> Budget:
    """One budget for rows that ask for several: as deep, as wide and as large as any of them, and by no rule."""
    first = budgets[0]
    if all(budget == first for budget in budgets):
        return first
    width = max(budget.width for budget in budgets)
    return Budget(
        depth=max(budget.depth for budget in budgets),
        width=width,
        nodes=max(map(size_of, budgets)) if width > 1 else None,
        children=first.children,
    )


class Wanted:
    """How much the rows of a batch want to be drafted for them, where any of them says it. ``of`` makes it."""

    def __init__(self, wishes: Sequence[Budget | AtMost | None]) -> None:
        self._own = [wish if isinstance(wish, Budget) else None for wish in wishes]
        self._most = [wish.nodes if isinstance(wish, AtMost) else None for wish in wishes]
        pairs = zip(self._own, self._most, strict=True)
        self._sizes = [most if own is None else size_of(own) for own, most in pairs]

    @classmethod
    def of(cls, wishes: Sequence[Budget | AtMost | None]) -> Wanted | None:
        """Return the wishes in the order of their rows; None if no request has one."""
        return cls(wishes) if any(wish is not None for wish in wishes) else None

    def plan(
        self, ctx: Context, planner: Planner | None, budget: Budget, rooms: list[int]
    ) -> tuple[Planner | None, Budget, list[int]]:
        """For a step: who decided on it and is to learn from it, the budget, and how far each row may go.

        Args:
            ctx: the rows.
            planner: decides for those that leave it to the engine; None: ``budget`` is what these get.
            budget: with the children that the rule needs.
            rooms: tokens that each row may still emit.
        """
        leaves_it = [most for own, most in zip(self._own, self._most, strict=True) if own is None]
        most = None if None in leaves_it else max((each for each in leaves_it if each is not None), default=None)
        if planner is not None and leaves_it:
            budget = planner.budget(ctx, budget.children, most)
        elif most is not None:
            budget = cut_to_nodes(budget, most)
        if len(leaves_it) == len(self._own):
            return planner, budget, rooms
        wanted = [own or budget for own in self._own]
        return None, widest(wanted), [min(room, own.depth + 1) for room, own in zip(rooms, wanted, strict=True)]

    def cut(self, ctx: Context, tree: DraftTree) -> DraftTree:
        """A tree whose rows have no more nodes than they want."""
        start = tree.num_nodes - tree.num_extra_nodes
        if all(most is None or most >= start - 1 for most in self._sizes):
            return tree
        counts = [start if most is None else most for most in self._sizes]
        return tree.at_most(ctx.tensor(counts))


def names_of(drafter: Drafter) -> tuple[str, ...]:
    """The names by which requests choose among drafts; an only one goes by its kind too."""
    return drafter.part_names or tuple(dict.fromkeys((drafter.name.split(" ")[0], drafter.name)))


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
