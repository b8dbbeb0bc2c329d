"""Several drafters as one: their trees are merged (SpecInfer, 2305.09781).

Drafters without a network draft first. A drafter that needs forwards is asked if the tokens it is expected to add are
worth its time. Equal paths of tokens are one node, no matter which drafters proposed it; its probability is calibrated
per drafter, and again per set of drafters, and the nodes worth their verification are kept.

Under the classic rules a node's children must come from one q. Each row then takes the first drafter without a network
that is confident of its next token, which depends on the row's tokens alone, or else the first of the others
(SAM-Decoding, 2411.10666).

Shape suffixes: B rows, N nodes, T tokens, F features.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.budget.acceptance import Acceptance
from draftwing.errors import DraftwingError
from draftwing.methods.base import Budget, Drafter, ListTree
from draftwing.models.context import Context, FeatureSpec, Row, TargetOutput
from draftwing.runtime.tree_builder import (
    UNKNOWN_PROB,
    AcceptRates,
    WeighedTree,
    num_worthwhile,
    prune_by_rule,
    together,
)
from draftwing.sampling import SamplingBatch
from draftwing.tree import PAD, Accepted, DraftTree, GrowthRule


def proposals(tree: DraftTree) -> list[ListTree]:
    """Return the rows of a batch of trees, with probabilities from those of the paths, or UNKNOWN_PROB, if needed."""
    probs, confidence = (None if values is None else values.tolist() for values in (tree.node_probs, tree.confidence))
    rows = []
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if probs is not None:
            node_probs = probs[row]
        elif confidence is not None:
            path_probs = confidence[row]
            node_probs = [
                prob / max(path_probs[max(above, 0)], 1e-9) for prob, above in zip(path_probs, parents, strict=True)
            ]
        else:
            node_probs = [UNKNOWN_PROB] * len(tokens)
        used = [node for node, token in enumerate(tokens) if token != PAD]
        place = {node: i for i, node in enumerate(used)}
        parents = [-1, *[place[parents[node]] for node in used[1:]]]
        rows.append(ListTree([tokens[node] for node in used], parents, [node_probs[node] for node in used]))
    return rows


class Offer:
    """The proposals of one drafter in one step. A tree becomes lists only when these are needed, which is rare."""

    def __init__(self, proposed: DraftTree | list[ListTree]) -> None:
        self.tree: DraftTree | None = None
        if isinstance(proposed, DraftTree):
            self.tree, self.is_used = proposed, proposed.num_nodes > 1
        else:
            self.rows, self.is_used = proposed, any(len(row.tokens) > 1 for row in proposed)

    @cached_property
    def rows(self) -> list[ListTree]:
        """The proposals by row; a lone root if there is nothing for a row."""
        assert self.tree is not None
        return proposals(self.tree)

    @property
    def num_forwards(self) -> float:
        """Draft forwards that the tree took."""
        if self.tree is None:
            return 0.0
        count = self.tree.num_draft_forwards
        return float(self.tree.max_depth) if count is None else count


def follow(proposal: ListTree | Union, tokens: Sequence[int]) -> list[int]:
    """Return the nodes along ``tokens``, the root first, as far as they were proposed."""
    children: dict[tuple[int, int], int] = {}
    for node in range(len(proposal.tokens) - 1, 0, -1):  # the first of equal siblings counts
        children[proposal.parents[node], proposal.tokens[node]] = node
    path = [0]
    for token in tokens:
        if (path[-1], token) not in children:
            break
        path.append(children[path[-1], token])
    return path


@dataclass
class Union(WeighedTree):
    """The union of the paths of several proposals; its probabilities are those of all drafters together."""

    # for each node the probability that each of its drafters gave it; empty for the root
    given_probs: list[dict[int, float]] = field(default_factory=lambda: [{}])
    # for each node a bit mask of the drafters that proposed any child of it
    child_proposers: list[int] = field(default_factory=lambda: [0])

    def proposers(self, node: int) -> int:
        """Return a bit mask of the drafters that proposed a node."""
        return sum(1 << drafter for drafter in self.given_probs[node])

    def weigh(self, chance: Callable[[Union, int], float]) -> None:
        """Set the probability of every node by ``chance``, scaled so that those of siblings sum to 1 at most."""
        node_probs, sums = [1.0] * len(self.tokens), [0.0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            node_probs[node] = chance(self, node)
            sums[self.parents[node]] += node_probs[node]
        path_probs = [1.0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            above = self.parents[node]
            node_probs[node] /= max(sums[above], 1.0)
            path_probs[node] = path_probs[above] * node_probs[node]
        self.node_probs, self.path_probs = node_probs, path_probs

    def ordered(self) -> list[int]:
        """Return all nodes, the likeliest first; parents come before their children, and ties are broken by depth."""
        return sorted(range(len(self.tokens)), key=lambda node: (-self.path_probs[node], self.depths[node], node))

    def within(self, budget: Budget) -> list[int]:
        """Return the nodes that a budget has room for, in the order of ``ordered``; all if a rule chooses a tree."""
        if budget.width == 1 and budget.paths is None:
            return self._best_chain()
        count = budget.nodes if budget.paths is None else len(budget.paths)
        if budget.rule is not None or count is not None:
            return self.ordered()[: None if budget.rule is not None or count is None else 1 + count]
        room, kept = [budget.width] * (budget.depth + 1), {0: None}
        for node in self.ordered()[1:]:
            if self.parents[node] in kept and self.depths[node] <= budget.depth and room[self.depths[node]]:
                room[self.depths[node]] -= 1
                kept[node] = None
        return list(kept)

    def _best_chain(self) -> list[int]:
        """Return the path with the most nodes expected to be accepted."""
        value = list(self.path_probs)
        for node in range(1, len(value)):
            value[node] += value[self.parents[node]]
        node = max(range(len(value)), key=value.__getitem__)
        path = [node]
        while path[0]:
            path.insert(0, self.parents[path[0]])
        return path


def unite(proposed: Sequence[ListTree]) -> Union:
    """Merge one proposal per drafter (a lone root if it has none). Equal siblings become one node."""
    union, children = Union([proposed[0].tokens[0]]), dict[tuple[int, int], int]()
    for drafter, proposal in enumerate(proposed):
        places = [0] * len(proposal.tokens)
        for node in range(1, len(proposal.tokens)):
            above, token = places[proposal.parents[node]], proposal.tokens[node]
            union.child_proposers[above] |= 1 << drafter
            child = children.setdefault((above, token), len(union.tokens))
            if child == len(union.tokens):
                union.tokens.append(token)
                union.parents.append(above)
                union.depths.append(union.depths[above] + 1)
                union.given_probs.append({})
                union.child_proposers.append(0)
            places[node] = child
            given = union.given_probs[child]
            given[drafter] = max(given.get(drafter, 0.0), proposal.node_probs[node])
    return union


def by_row(trees: Sequence[DraftTree], chosen: Sequence[int]) -> DraftTree:
    """Return a batch with each row from its chosen tree, including q."""
    if len(set(chosen)) == 1:
        return trees[chosen[0]]
    used = [trees[place] for place in chosen]
    width = max(tree.num_nodes for tree in used)

    def stack(columns: Sequence[Tensor], padding: int) -> Tensor:
        sides = [(0, 0) * (column.ndim - 2) + (0, width - column.shape[1]) for column in columns]
        pairs = enumerate(zip(columns, sides, strict=True))
        return torch.stack([F.pad(column[row], side, value=padding) for row, (column, side) in pairs])

    tokens, parents = stack([tree.tokens for tree in used], PAD), stack([tree.parents for tree in used], -1)
    is_line, depth = all(tree.is_line for tree in used), max(tree.max_depth for tree in used)
    known_probs = [tree.draft_probs for tree in used if tree.draft_probs is not None]
    if not known_probs or any(tree.draft_probs is None and tree.num_nodes > 1 for tree in used):
        return DraftTree(tokens, parents, is_line=is_line, depth=depth)  # a rule that needs q raises an error
    zeros = known_probs[0].new_zeros(len(chosen), 1, known_probs[0].shape[2])
    draft_probs = stack([zeros if tree.draft_probs is None else tree.draft_probs for tree in used], 0)
    return DraftTree(tokens, parents, None, draft_probs, is_line=is_line, depth=depth)


def kept_tokens(tree: DraftTree, accepted: Accepted) -> list[list[int]]:
    """Return the tokens of each row's accepted nodes."""
    if accepted.on_host is not None:
        return [emitted.tokens[:-1] for emitted in accepted.on_host]
    drafted = tree.tokens.gather(1, accepted.path.clamp(min=0)).tolist()
    return [tokens[1 : num + 1] for tokens, num in zip(drafted, accepted.num.tolist(), strict=True)]


def part_path(proposed: Sequence[ListTree], kept: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Return the nodes of the ``kept`` tokens as one drafter numbers them, then PAD, in the shape of ``like``."""
    paths, width = [follow(row, tokens) for row, tokens in zip(proposed, kept, strict=True)], like.shape[1]
    return torch.tensor([[*path, *[PAD] * (width - len(path))] for path in paths], device=like.device)


# --- how often drafters are right, and when to ask one that costs forwards -------------------------------------------

FIRST_OUTCOMES, MAX_OUTCOMES = 1, 64  # outcomes that a table learns from at once: few at first
LEARN_ALL_STEPS, LEARN_EVERY = 128, 4  # after this many steps, learn from every 4th only: learning takes time
EXPECTED_TOKENS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # bins of the tokens expected from the other drafters
MIN_ANSWERS = 6  # times to ask a drafter in each bin before judging it
DOUBT_TOKENS = 1.0  # tokens, divided by the number of answers: uncertainty that the variance of few answers hides
CARRIED_ANSWERS = 10  # weight of the answers from earlier requests when another begins
MAX_SLOWDOWN = 1.5  # a draft that takes longer, relative to the average, was interrupted by the machine
EMA_WEIGHT = 0.03  # smallest weight of the latest answer
MIN_PATIENCE, MAX_PATIENCE = 4, 64  # refusals after which a drafter is asked anyway, at first and at most


class RateTable:
    """How often nodes of a given probability and depth are accepted."""

    def __init__(self) -> None:
        self._acceptance, self._num_seen = Acceptance(), 0
        # Probability, depth (from 1) and outcome of nodes whose parents were accepted, not learned from yet.
        self.pending: list[tuple[float, int, bool]] = []
        self.lines = self._acceptance.tables()
        self.rates = AcceptRates(*self.lines)

    def settle(self) -> None:
        """Learn from the pending outcomes if they are enough."""
        if len(self.pending) >= min(FIRST_OUTCOMES + self._num_seen // 4, MAX_OUTCOMES):
            self._num_seen += len(self.pending)
            self._acceptance.observe(*zip(*self.pending, strict=True))
            self.pending, self.lines = [], self._acceptance.tables()
            self.rates = AcceptRates(*self.lines)


def outcomes(proposal: ListTree | Union, emitted: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield (node, depth, is right) of the nodes whose parents were accepted, if the next token is known."""
    depths = {node: depth for depth, node in enumerate(follow(proposal, emitted))}
    for node in range(1, len(proposal.tokens)):
        depth = depths.get(proposal.parents[node])
        if depth is not None and depth < len(emitted):
            yield node, depth + 1, proposal.tokens[node] == emitted[depth]


class DraftCalibration:
    """Calibrates the probabilities of several drafters; shared by all decode loops of a model.

    A drafter's probability is calibrated by the outcomes of its earlier ones. If several drafters proposed children of
    a node, their probabilities of one token are combined as independent, and the result is calibrated by the outcomes
    for the same proposers of the node and of its siblings.
    """

    def __init__(self, num_drafters: int) -> None:
        self.tables = [RateTable() for _ in range(num_drafters)]
        self.shared: dict[tuple[int, int], RateTable] = {}
        self.asking = [Asking() for _ in range(num_drafters)]
        self._lock, self._num_steps = threading.Lock(), 0

    @cached_property
    def sampled(self) -> DraftCalibration:
        """The calibration of sampled requests; ``self`` has that of greedy ones.

        Sampling noise changes how drafters estimate probabilities, and sampled text repeats itself less.
        """
        return DraftCalibration(len(self.tables))

    def is_due(self) -> bool:
        """Return True if this step should be learned from: all at first, later some."""
        self._num_steps += 1
        return self._num_steps <= LEARN_ALL_STEPS or self._num_steps % LEARN_EVERY == 0

    def calibrated(self, drafter: int, rule: GrowthRule) -> GrowthRule:
        knots, rates = self.tables[drafter].lines
        return replace(rule, knots=knots, rates=rates)

    def path_probs(self, drafter: int, proposal: ListTree) -> list[float]:
        """Return the probability of every node's path, by one drafter alone."""
        rates, reached, depths = self.tables[drafter].rates, [1.0], [0]
        for node in range(1, len(proposal.tokens)):
            above = proposal.parents[node]
            depths.append(depths[above] + 1)
            reached.append(reached[above] * rates(proposal.node_probs[node], depths[above]))
        return reached

    def chance(self, union: Union, node: int) -> float:
        """Return a node's probability given its parent, from all drafters that proposed its siblings or itself."""
        prob = self._joint(union, node)
        table = self.shared.get((union.proposers(node), union.child_proposers[union.parents[node]]))
        return prob if table is None else table.rates(prob, union.depths[node] - 1)

    def _joint(self, union: Union, node: int) -> float:
        """Return the probability that not all proposers of a node are wrong."""
        level, wrong = union.depths[node] - 1, 1.0
        for drafter, prob in union.given_probs[node].items():
            wrong *= 1 - self.tables[drafter].rates(prob, level)
        return 1 - wrong

    def learn(self, proposed: Sequence[ListTree], union: Union | None, emitted: Sequence[int]) -> None:
        """Learn from the tokens that a request emitted after the root: of each proposal, and of their union."""
        with self._lock:
            for table, proposal in zip(self.tables, proposed, strict=True):
                for node, depth, is_right in outcomes(proposal, emitted):
                    table.pending.append((proposal.node_probs[node], depth, is_right))
            if union is not None:
                self.learn_shared(union, emitted)
            for table in (*self.tables, *self.shared.values()):
                table.settle()

    def learn_shared(self, union: Union, emitted: Sequence[int]) -> None:
        """Add the outcomes of nodes with several proposers, of the nodes themselves or of siblings."""
        for node, depth, is_right in outcomes(union, emitted):
            siblings_by = union.child_proposers[union.parents[node]]
            if siblings_by & (siblings_by - 1):  # more than one bit is set
                table = self.shared.setdefault((union.proposers(node), siblings_by), RateTable())
                table.pending.append((self._joint(union, node), depth, is_right))


@dataclass
class Proposed:
    """The proposals of a step, until the tokens it emitted are known."""

    # rows, starts: the rows, and their lengths before the step
    rows: Sequence[Row]
    starts: Sequence[int]
    offers: Sequence[Offer]  # by drafter
    unions: Sequence[Union | None]  # for each row; None if only one drafter proposed something
    # for each drafter that was asked and costs forwards, by row the tokens expected from those before it
    expected: Mapping[int, Sequence[float]]
    names: Sequence[str] = ()  # names of the drafters; nothing is learned about one that a request did not choose

    def learn(self, calibration: DraftCalibration, *, whole: bool) -> None:
        """Learn from the tokens emitted since: what each drafter added and, if ``whole``, every node."""
        if not whole and not self.expected:
            return
        for number, (row, start) in enumerate(zip(self.rows, self.starts, strict=True)):
            emitted = row.tokens[start + 1 :]
            if not emitted:  # the step was undone
                continue
            proposed = [offer.rows[number] for offer in self.offers]
            if whole:
                calibration.learn(proposed, self.unions[number], emitted)
            for place, expected in self.expected.items():
                if row.drafts is None or row.takes(self.names[place]):
                    depths = [
                        min(len(follow(tree, emitted)) - 1, row.length - start - 1) if offer.is_used else 0
                        for tree, offer in zip(proposed[: place + 1], self.offers, strict=False)
                    ]
                    num_added = max(depths[-1] - max(depths[:-1], default=0), 0)
                    num_nodes = len(proposed[place].tokens) - 1 if self.offers[place].is_used else 0
                    calibration.asking[place].add_gain(expected[number], num_added, num_nodes)


class Asking:
    """Decides when to ask a drafter that costs forwards, by the tokens it added to those expected from the others.

    Everything is learned: the added tokens, the time by number of rows, the added nodes. Time is counted in forwards
    of the target, so that a drafter that is asked rarely is not judged by how slow the machine once was.
    """

    def __init__(self) -> None:
        num_bins = len(EXPECTED_TOKENS) + 1
        self.mean_added, self._mean_squares = [0.0] * num_bins, [0.0] * num_bins
        self.num_answers = [0] * num_bins
        self.forwards_by_rows: dict[int, tuple[int, float]] = {}  # number of rows: times, average forwards
        self._num_nodes = 0.0
        self.begin_request()

    def begin_request(self) -> None:
        """Weigh the answers of a new request more than earlier ones, and ask again soon."""
        self.num_answers = [min(seen, CARRIED_ANSWERS) for seen in self.num_answers]
        self._refused, self._patience = [0] * len(self.num_answers), [MIN_PATIENCE] * len(self.num_answers)

    def is_worth_it(self, expected: Sequence[float], nodes: int, rule: GrowthRule) -> bool:
        """Return True if the drafter should be asked in the next step.

        The others are expected to give ``expected`` tokens by row, for which ``nodes`` of each row would be verified.
        """
        bins = [_bin(tokens) for tokens in expected]
        times, forwards = self.forwards_by_rows.get(len(bins), (0, 0.0))
        if not times or any(self.num_answers[place] < MIN_ANSWERS for place in bins):
            return True
        last = len(rule.verify) - 1
        here, there = min(nodes + 1, last), min(nodes + 1 + round(self._num_nodes), last)
        takes = forwards * float(rule.verify[1]) + float(rule.verify[there] - rule.verify[here])
        # An upper confidence bound: a few steps in which it added little prove little.
        added = sum([self.mean_added[place] + self._doubt(place) for place in bins])
        if added * rule.worth > takes:
            for place in bins:
                self._refused[place], self._patience[place] = 0, MIN_PATIENCE
            return True
        for place in bins:
            self._refused[place] += 1
        first = bins[0]
        if self._refused[first] < self._patience[first]:
            return False
        self._refused[first], self._patience[first] = 0, min(2 * self._patience[first], MAX_PATIENCE)
        return True

    def _doubt(self, place: int) -> float:
        """Return how many tokens more than the mean it may add (empirical Bernstein bound)."""
        scatter = max(self._mean_squares[place] - self.mean_added[place] ** 2, 0.0)
        return math.sqrt(scatter / self.num_answers[place]) + DOUBT_TOKENS / self.num_answers[place]

    def add_time(self, rows: int, seconds: float, rule: GrowthRule) -> None:
        forwards = seconds / float(rule.verify[1])
        times, average = self.forwards_by_rows.get(rows, (0, forwards))
        if times < MIN_ANSWERS:  # the first drafts are slow: take the fastest
            average = min(average, forwards)
        else:  # limit the influence of interruptions
            average += 0.1 * (min(forwards, MAX_SLOWDOWN * average) - average)
        self.forwards_by_rows[rows] = times + 1, average

    def add_gain(self, expected: float, tokens: int, nodes: int) -> None:
        """Record the tokens and nodes that it added in a row in which ``expected`` tokens came from the others."""
        place = _bin(expected)
        self.num_answers[place] += 1
        weight = max(EMA_WEIGHT, 1 / self.num_answers[place])
        self.mean_added[place] += weight * (tokens - self.mean_added[place])
        self._mean_squares[place] += weight * (tokens * tokens - self._mean_squares[place])
        self._num_nodes += EMA_WEIGHT * (nodes - self._num_nodes)


def _bin(expected: float) -> int:
    return bisect_right(EXPECTED_TOKENS, expected) if expected > 0 else 0


# --- the drafter -----------------------------------------------------------------------------------------------------

CONFIDENT = 0.75  # probability of its next token from which a drafter is taken alone: for lookup, a match of three
MIN_COPY_DEPTH = 16  # tokens to draft at least if drafting takes no forwards


class CombinedDrafter(Drafter):
    """Drafts with all of its ``parts``; those that cost no forwards are asked first.

    Args:
        calibration: of their probabilities, in the order of ``self.parts``; shared by all decode loops of a model.
        names: by which a request chooses among them; None: their own.
    """

    grows_by_rule = True  # each part by its calibrated probabilities

    def __init__(
        self, parts: Sequence[Drafter], calibration: DraftCalibration, names: Sequence[str] | None = None
    ) -> None:
        pairs = zip(parts, names or [part.name for part in parts], strict=True)
        ordered = sorted(pairs, key=lambda pair: pair[0].costs_forwards)
        self.parts, self.part_names = [part for part, _ in ordered], tuple(name for _, name in ordered)
        self.name = " + ".join(part.name for part in self.parts)
        self.features = FeatureSpec(tuple(dict.fromkeys(tap for part in self.parts for tap in part.features.taps)))
        self.drafts = any(part.drafts for part in self.parts)
        self.costs_forwards = any(part.costs_forwards for part in self.parts)
        self.learns = any(part.learns for part in self.parts)
        self.has_probs = all(part.has_probs for part in self.parts)
        self.resumes = all(part.resumes or not (part.reads_features or part.costs_forwards) for part in self.parts)
        self.identity = " + ".join(f"{part.name} {part.identity}".strip() for part in self.parts)
        self.num_bytes = sum(part.num_bytes for part in self.parts)
        self.runs_as = ", ".join(dict.fromkeys(part.runs_as for part in self.parts if part.runs_as))
        self.tokenizer = ", ".join(dict.fromkeys(part.tokenizer for part in self.parts if part.tokenizer))
        self._resuming = [part for part in self.parts if part.resumes]
        # For each part the offer in which its accepted nodes are found; None if its tree was taken unchanged, or if it
        # does not need them (``Drafter.list_trees``).
        self._offers: list[Offer | None] = [None] * len(self.parts)
        self._extra_from: int | None = None  # the part whose extra nodes are scored (``DraftTree.num_extra_nodes``)
        self._extra: tuple[Tensor, Tensor, int] | None = None
        self.calibration = self._calibration = calibration  # for greedy requests; for the rows of this step
        self._step: Proposed | None = None
        self._row: Row | None = None  # the last one that ran alone

    def learn(self) -> None:
        for part in self.parts:
            part.learn()

    def forget(self) -> None:
        for part in self.parts:
            part.forget()

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Admit the row to all parts or to none."""
        done: list[Drafter] = []
        try:
            for part in self.parts:
                part.admit(ctx, self._features_for(part, features))
                done.append(part)
        except DraftwingError:
            for part in done:
                part.remove(ctx, ctx.num_rows - 1)
            raise

    @property
    def num_read(self) -> list[int]:
        return [min(counts) for counts in zip(*(part.num_read for part in self._resuming), strict=True)]

    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        for part in self._resuming:
            part.read_on(ctx, row, self._features_for(part, features), stop)

    def remove(self, ctx: Context, row: int) -> None:
        for part in self.parts:
            part.remove(ctx, row)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Give every part the outcome of the whole tree, and its accepted nodes."""
        proposed = tree.proposed

        def path_in(offer: Offer) -> Tensor:
            return part_path(offer.rows, kept_tokens(proposed, accepted), accepted.path)

        for place, (part, offer) in enumerate(zip(self.parts, self._offers, strict=True)):
            renumbered = accepted if offer is None else replace(accepted, own=partial(path_in, offer))
            features = self._features_for(part, output.features)
            part_output = output if features is output.features else replace(output, features=features)
            part.observe(ctx, tree if place == self._extra_from else proposed, renumbered, part_output)

    def _features_for(self, part: Drafter, features: Tensor | None) -> Tensor | None:
        taps = part.features.taps
        if features is None or taps == self.features.taps:
            return features
        if not taps:
            return None
        by_tap = features.chunk(len(self.features.taps), 2)
        return torch.cat([by_tap[self.features.taps.index(tap)] for tap in taps], 2)

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Return the best nodes of all proposals within the budget."""
        step, self._step = self._step, None
        if step is not None:
            step.learn(self._calibration, whole=self._calibration.is_due())
        if ctx.num_rows == 1 and ctx.rows[0] is not self._row:
            self._row = ctx.rows[0]
            for asking in (*self.calibration.asking, *self.calibration.sampled.asking):
                asking.begin_request()
        self._calibration = self.calibration if sampling.all_greedy else self.calibration.sampled
        self._offers, self._extra_from, self._extra = [None] * len(self.parts), None, None
        if budget.depth == 0:
            for part in self.parts:
                if not part.lists:
                    part.propose(ctx, sampling, budget)
            return ctx.roots()
        is_drawn = budget.children in ("sampled", "distinct")
        tree = (self._first_confident if is_drawn else self._merged)(ctx, sampling, budget)
        return tree if self._extra is None else tree.with_extra_nodes(*self._extra)

    def _merged(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        self._step, num_forwards = self._ask(ctx, sampling, budget)
        offers, rule = self._step.offers, budget.rule
        used = [place for place, offer in enumerate(offers) if offer.is_used]
        if not used:
            return replace(ctx.roots(), num_draft_forwards=num_forwards)
        self._offers = [None if part.lists else offer for part, offer in zip(self.parts, offers, strict=True)]
        if len(used) == 1 and (tree := offers[used[0]].tree) is not None:
            if rule is not None and not self.parts[used[0]].grows_by_rule:
                tree = prune_by_rule(tree, self._calibration.calibrated(used[0], rule))
            else:
                self._offers[used[0]] = None
            return replace(tree, num_draft_forwards=num_forwards)
        unions = [unite(row) for row in zip(*[offer.rows for offer in offers], strict=True)]
        for union in unions:
            union.weigh(self._calibration.chance)
        if len(used) > 1:
            self._step.unions = unions
        kept = [union.within(budget) for union in unions]
        if rule is not None:
            ranked = [[union.path_probs[node] for node in nodes[1:]] for union, nodes in zip(unions, kept, strict=True)]
            count = 1 + num_worthwhile(ranked, rule, rule.max_nodes)
            pairs = zip(unions, kept, strict=True)
            kept = [[node for node in nodes[:count] if union.path_probs[node] > 0] for union, nodes in pairs]
        return together(unions, kept, ctx.device, num_forwards)

    def _ask(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> tuple[Proposed, float]:
        """Return every drafter's offer, and the draft forwards it took."""
        rule, num_rows, num_forwards, num_worthy = budget.rule, ctx.num_rows, 0.0, 0
        offers, expected, expected_before = list[Offer](), [0.0] * num_rows, dict[int, list[float]]()
        for place, part in enumerate(self.parts):
            costs, asking, part_budget = part.costs_forwards, self._calibration.asking[place], budget
            is_asked = any(row.takes(self.part_names[place]) for row in ctx.rows)
            if costs and rule is not None:
                is_asked = is_asked and asking.is_worth_it(expected, num_worthy, rule)
            if rule is not None:  # by its own calibration, and deep if drafting takes no forwards
                depth = budget.depth if costs else max(budget.depth, MIN_COPY_DEPTH)
                part_budget = replace(budget, depth=depth, rule=self._calibration.calibrated(place, rule))
            start = time.perf_counter()
            offer = self._offer(place, ctx, sampling, part_budget if is_asked else _no_depth(budget))
            if costs and is_asked:
                if rule is not None:
                    asking.add_time(num_rows, time.perf_counter() - start, rule)
                expected_before[place], num_forwards = expected, num_forwards + offer.num_forwards
            if rule is not None and offer.is_used and (offer.tree is None or place + 1 < len(self.parts)):
                path_probs = [self._calibration.path_probs(place, row) for row in offer.rows]
                ranked = [sorted(row[1:], reverse=True) for row in path_probs]
                worthy = num_worthwhile(ranked, rule, rule.max_nodes)
                offer.is_used = costs or worthy > 0
                if offer.is_used:
                    num_worthy = max(num_worthy, worthy)
                    expected = [max(old, sum(new[1:])) for old, new in zip(expected, path_probs, strict=True)]
            offers.append(offer)
        unions: list[Union | None] = [None] * num_rows
        return Proposed(list(ctx.rows), ctx.lengths, offers, unions, expected_before, self.part_names), num_forwards

    def _first_confident(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Return each row's tree from one drafter, chosen by the row's tokens before anything is drawn from q."""
        none, num_forwards, offers = len(self.parts), 0.0, list[Offer]()
        chosen = [none] * ctx.num_rows
        allowed = [[place for place in range(none) if row.takes(self.part_names[place])] or [0] for row in ctx.rows]
        for place, part in enumerate(self.parts):
            free = [row for row, other in enumerate(chosen) if other == none and place in allowed[row]]
            offer = self._offer(place, ctx, sampling, budget if free else _no_depth(budget))
            offers.append(offer)
            num_forwards += offer.num_forwards if part.costs_forwards and free else 0
            for row in free:
                is_last = part.costs_forwards or place == allowed[row][-1]
                if is_last or max(offer.rows[row].node_probs[1:2], default=0.0) >= CONFIDENT:
                    chosen[row] = place
        self._offers = [offer if set(chosen) != {place} else None for place, offer in enumerate(offers)]
        trees = [offer.tree for offer in offers if offer.tree is not None]
        return replace(by_row(trees, chosen), num_draft_forwards=num_forwards)

    def _offer(self, place: int, ctx: Context, sampling: SamplingBatch, budget: Budget) -> Offer:
        """Return a part's proposals for the rows whose requests take it; extra nodes of one part are kept for later."""
        part, name = self.parts[place], self.part_names[place]
        refused = [number for number, row in enumerate(ctx.rows) if not row.takes(name)]
        if part.lists and budget.depth and budget.children in ("keyed", "top"):
            rows = list(part.list_trees(ctx, budget))
            for number in refused:
                rows[number] = ListTree(ctx.rows[number].tokens[-1:])
            return Offer(rows)
        tree = part.propose(ctx, sampling, _no_depth(budget) if len(refused) == ctx.num_rows else budget)
        if tree.num_extra_nodes and self._extra_from is None:
            self._extra_from, self._extra = place, tree.extra_nodes
        tree = tree.proposals
        return Offer(tree.without([(row, node) for row in refused for node in range(1, tree.num_nodes)]))


def _no_depth(budget: Budget) -> Budget:
    return Budget(0, children=budget.children)
