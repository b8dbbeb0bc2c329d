"""Limits that a request may set besides its sampling, checked before any work is done, and those of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draftwing.accept import Rule
from draftwing.budget.planner import Planner
from draftwing.checks import listed
from draftwing.errors import ConfigError, shown
from draftwing.methods.base import MAX_NODES, Budget, Drafter, cut_to_nodes
from draftwing.models.context import Context
from draftwing.sampling import Sampling
from draftwing.tree import DraftTree


@dataclass(frozen=True)
class AtMost:
    """Use the engine's own budget for a request, with at most ``nodes`` nodes (at least 1, without the root).

    Raises:
        ConfigError: ``nodes`` is not such a number.
    """

    nodes: int

    def __post_init__(self) -> None:
        if isinstance(self.nodes, bool) or not isinstance(self.nodes, int) or not 1 <= self.nodes <= MAX_NODES:
            raise ConfigError(f"a tree has 1 to {MAX_NODES:,} nodes at most, found {shown(self.nodes)}: choose one")


def budget_for_rule(budget: Budget, rule: Rule) -> Budget:
    """Return ``budget`` with the children that ``rule`` needs; raise ConfigError if the rule cannot use it."""
    if rule.chain_only and not budget.is_chain:
        raise ConfigError(f"rule {rule.name!r} takes chains, found width {budget.width}: use width 1 or 'match'")
    return replace(budget, children=rule.children)


SMALL_TREE = 2  # nodes that a request gets whatever the others use: they cost a step of a few rows little


class RowBudgets:
    """The budgets that the rows of a batch ask for.

    Args:
        budgets: one per row: a budget, a limit on the engine's own, or None for the engine's own.
    """

    def __init__(self, budgets: Sequence[Budget | AtMost | None]) -> None:
        self._fixed = [budget if isinstance(budget, Budget) else None for budget in budgets]
        self._max_nodes = [None if budget is None else _num_nodes(budget) for budget in budgets]

    def plan(
        self, ctx: Context, planner: Planner | None, budget: Budget, rooms: list[int]
    ) -> tuple[Planner | None, Budget, list[int]]:
        """Choose a step's budget.

        All rows are padded to the largest tree. So that one request's tree does not slow the others, a step's tree is
        the engine's own if any row uses that, and else at most 1.5 times as large as the median of the rows' trees.
        Trees of ``SMALL_TREE`` nodes are always drafted.

        Args:
            ctx: the rows.
            planner: chooses for rows without a fixed budget; if None, they use ``budget``.
            budget: has the children that the rule needs.
            rooms: tokens that each row may still emit.

        Returns:
            The planner that learns from the step, if any; the budget; the tokens that each row may emit in the step.
        """
        limits = [nodes for fixed, nodes in zip(self._fixed, self._max_nodes, strict=True) if fixed is None]
        max_nodes = None if None in limits else max((nodes for nodes in limits if nodes is not None), default=None)
        if planner is not None and limits:
            budget = planner.budget(ctx, budget.children, max_nodes)
        elif max_nodes is not None:
            budget = cut_to_nodes(budget, max_nodes)
        if len(limits) == len(self._fixed):
            return planner, budget, rooms
        budgets = [fixed or budget for fixed in self._fixed]
        rooms = [min(room, each.depth + 1) for room, each in zip(rooms, budgets, strict=True)]
        small = min(SMALL_TREE, max(_num_nodes(fixed) for fixed in self._fixed if fixed is not None))
        if limits:
            return None, budget if _num_nodes(budget) >= small else Budget(small, children=budget.children), rooms
        first, width, sizes = budgets[0], max(each.width for each in budgets), sorted(map(_num_nodes, budgets))
        if any(each != first for each in budgets):  # as deep, as wide and as large as any of them
            nodes = sizes[-1] if width > 1 else None
            first = Budget(max(each.depth for each in budgets), width, nodes, children=first.children)
            median = sizes[(len(sizes) - 1) // 2]
            first = cut_to_nodes(first, max(small, 3 * (median + 1) // 2 - 1))  # the root is a node too
        return None, first, rooms

    def cut(self, ctx: Context, tree: DraftTree) -> DraftTree:
        """Return ``tree`` without the nodes beyond each row's limit."""
        start = tree.num_nodes - tree.num_extra_nodes
        if all(nodes is None or nodes >= start - 1 for nodes in self._max_nodes):
            return tree
        return tree.at_most(ctx.tensor([start if nodes is None else nodes for nodes in self._max_nodes]))


def _num_nodes(budget: Budget | AtMost) -> int:
    return budget.nodes if isinstance(budget, AtMost) else budget.max_nodes


def names_of(drafter: Drafter) -> tuple[str, ...]:
    """Return the names by which requests select drafts; a single draft is known by its kind too."""
    return drafter.part_names or tuple(dict.fromkeys((drafter.name.split(" ")[0], drafter.name)))


def check_constraint(constraint: object, sampling: Sampling) -> None:
    """Raise ConfigError if a request cannot be decoded under ``constraint``."""
    if not callable(getattr(constraint, "start", None)):
        raise ConfigError(
            f"constraint must have a start() that returns a state, found {shown(constraint)}: pass the result of "
            f"LM.constraint(...)"
        )
    if sampling.ignore_eos:
        raise ConfigError(
            "a constrained text ends with an end token when it is complete, but ignore_eos forbids that: leave one out"
        )


def check_drafts(drafts: object, loaded: Sequence[str]) -> tuple[str, ...]:
    """Return the drafts that a request selects; raise ConfigError if one is not loaded."""
    names = None if isinstance(drafts, str | Mapping) else listed(drafts, 1000)
    if names is None:
        raise ConfigError(f"drafts must be a list of names, found {shown(drafts)}: write [{shown(drafts)}]")
    for name in names:
        if not isinstance(name, str) or name not in loaded:
            raise ConfigError(
                f"drafts: {shown(name)} is not loaded: choose among {', '.join(loaded)}, or load the model with "
                f"draft='... + ...'"
            )
    return tuple(names)
