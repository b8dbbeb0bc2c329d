"""A request: what was asked for, within which limits, what has been written so far, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from draftwing.accept import Rule
from draftwing.budget.planner import Planner
from draftwing.checks import listed
from draftwing.constraint import Constraint, State
from draftwing.errors import ConfigError, DraftwingError, shown
from draftwing.methods.base import MAX_NODES, Budget, Drafter, cut_to_nodes
from draftwing.models.context import Context
from draftwing.sampling import Sampling
from draftwing.stats import Logprob, RowStep, Share, Stats, Step
from draftwing.text.tokenizer import TextStream, TokenDecoder
from draftwing.tree import DraftTree

SMALL_TREE = 2  # nodes that a request gets whatever the others use: they cost a step of a few rows little


def with_seed(sampling: Sampling) -> Sampling:
    """With a seed from PyTorch's generator (``torch.manual_seed`` governs it), where there is none and one is needed.

    Greedy decoding needs none, and draws nothing.
    """
    if sampling.seed is not None:
        return sampling
    return replace(sampling, seed=int(torch.randint(2**63 - 1, ())) if sampling.temperature > 0 else 0)


@dataclass(eq=False)
class Request:
    """One text under way. ``Engine.submit`` makes it, every step of the loop adds to it.

    Attributes:
        id: its number, unique within an engine or decoder.
        prompt_ids: the prompt.
        sampling: how it is sampled and when it ends. A seed of None is drawn here, once, where there is something to
            draw.
        speculation: how much is drafted for it; None: as much as for everyone, or no more than ``AtMost`` of that.
        tokenizer: turns its ids into text; None: it is ids alone, and has no stop strings.
        references: texts, as ids, that are likely to be repeated in it: a drafter may copy from them.
        constraint: what it may say; None: anything.
        drafts: names of the drafters that propose for it, where there are several; None: all.
        priority: those with more come first, and are the last to give their slots up.
        deadline: seconds of ``time.monotonic`` at which it ends wherever it is; None: whenever it ends.
        token_ids: emitted so far, cut where the text ended.
        finish_reason: None while it waits or runs, then ``stop`` (a stop token or string), ``length``, ``error``,
            ``cancelled`` or ``deadline``.
        error: why it failed.
        num_cached: tokens of its prompt that were found in the slots of others when it was first read.
        is_restricted: some tokens may be forbidden, at least at the start of its text.

    Raises:
        ConfigError: stop strings without a tokenizer.
    """

    id: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    speculation: Budget | AtMost | None = None
    tokenizer: TokenDecoder | None = None
    references: Sequence[Sequence[int]] = ()
    constraint: Constraint | None = None
    drafts: Sequence[str] | None = None
    priority: int = 0
    deadline: float | None = None
    token_ids: list[int] = field(default_factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)
    error: DraftwingError | None = field(default=None, init=False)
    num_cached: int | None = field(default=None, init=False)
    is_restricted: bool = field(default=False, init=False)
    _steps: dict[int, tuple[RowStep, Share]] = field(default_factory=dict, init=False, repr=False)  # by position
    # (number of tokens, the state after them)
    _state: tuple[int, State] | None = field(default=None, init=False, repr=False)
    _stream: TextStream | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, Sampling):
            raise ConfigError(f"sampling must be a Sampling, found {shown(self.sampling)}: write Sampling()")
        if self.sampling.stop and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer: give one, or use stop_tokens")
        self.sampling = with_seed(self.sampling)
        self.is_restricted = self.constraint is not None or self.sampling.min_tokens > 0
        self.restart_text()

    @property
    def text(self) -> str:
        """The text so far, without special tokens and the stop string."""
        return "".join(row.text for row, _ in self._steps.values())

    @property
    def rows(self) -> list[RowStep]:
        """Its share of every step so far."""
        return [row for row, _ in list(self._steps.values())]

    @property
    def logprobs(self) -> list[Logprob]:
        """One per token where asked for, else none."""
        return [found for row, _ in self._steps.values() for found in row.logprobs or ()]

    @property
    def stats(self) -> Stats:
        """Its steps, folded. Its seconds are its share of each step's."""
        stats = Stats()
        for row, share in self._steps.values():
            stats.add_row(row, share)
        return stats

    def restart_text(self) -> None:
        """Make the text's state follow from the ids: a step that was interrupted may have left it ahead of them."""
        if self.tokenizer is not None:
            own = self.sampling
            self._stream = TextStream(self.tokenizer, self.prompt_ids, own.stop, min_ids=own.min_tokens)
            self._stream.push(self.token_ids)

    def state(self) -> State:
        """Return the state of the constraint after ``token_ids``; fork it before advancing it.

        It is replaced by one assignment, so that an interrupt leaves the old one intact.
        """
        assert self.constraint is not None
        count, state = self._state or (0, self.constraint.start())
        if count < len(self.token_ids):
            state = state.fork()
            for token in self.token_ids[count:]:
                state.take(token)
        self._state = len(self.token_ids), state
        return state

    def cut(self, tokens: list[int], room: int, eos_ids: Sequence[int]) -> tuple[list[int], str, str | None]:
        """Return the ids and the text of ``tokens`` up to where the request ends, and why it ends there.

        Args:
            tokens: the next ones.
            room: how many of them fit.
            eos_ids: the model's end tokens.
        """
        ends = self.sampling.stop_tokens if self.sampling.ignore_eos else (*self.sampling.stop_tokens, *eos_ids)
        finish = None
        if len(tokens) >= room:
            tokens, finish = tokens[:room], "length"
        for place, token in enumerate(tokens):
            if token in ends:
                tokens, finish = tokens[: place + 1], "stop"
                break
        if self._stream is None:
            return tokens, "", finish
        text = self._stream.push(tokens)
        if self._stream.stopped is not None:
            return tokens[: self._stream.num_tokens_kept - len(self.token_ids)], text, "stop"
        return tokens, text + self._stream.flush() if finish else text, finish

    def take(self, row: RowStep, step: Step) -> None:
        """Add a step's share. Done again, it changes nothing: an interrupted step is finished by the next one."""
        self.token_ids[row.position - len(self.prompt_ids) :] = row.token_ids
        self._steps[row.position] = row, Share(step.timings, len(step.rows), step.lossless)
        self.error = row.error
        self.finish_reason = self.finish_reason or row.finish_reason


# --- limits -----------------------------------------------------------------------------------------------------------


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
                f"drafts: {shown(name)} is not loaded: choose {', '.join(loaded)}, or load the model with "
                f"draft='... + ...'"
            )
    return tuple(names)
