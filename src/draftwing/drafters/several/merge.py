"""Several drafters' trees for one row as one: the union of their paths (SpecInfer, 2305.09781).

Pure functions on lists. A path of tokens is one node, whoever proposed it; who did is kept, since a claim is judged by
who made it and by who spoke otherwise (``drafters.several.claims``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.drafters.base import Budget
from draftwing.drafters.growing.worth import UNTOLD
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = [
    "Offer",
    "Proposal",
    "Union",
    "alone",
    "by_row",
    "follow",
    "kept_tokens",
    "own_path",
    "proposals",
    "together",
    "unite",
]


@dataclass(frozen=True)
class Proposal:
    """One row's tree: the root first, parents before their children, no unused nodes.

    Attributes:
        told: the chance of each node given its parent, as its drafter says.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    told: Sequence[float]


def proposals(tree: DraftTree) -> list[Proposal]:
    """The rows of a batch of trees. Where nothing was told of a node, its path's confidence says it, or UNTOLD."""
    columns = [tree.tokens.tolist(), tree.parents.tolist()]
    told, reached = (None if each is None else each.tolist() for each in (tree.told, tree.confidence))
    found = []
    for row, (tokens, parents) in enumerate(zip(*columns, strict=True)):
        if told is not None:
            said = told[row]
        elif reached is not None:
            said = [
                own / max(reached[row][max(above, 0)], 1e-9) for own, above in zip(reached[row], parents, strict=True)
            ]
        else:
            said = [UNTOLD] * len(tokens)
        used = [node for node, token in enumerate(tokens) if token != PAD]
        if len(used) == used[-1] + 1:
            found.append(Proposal(tokens[: len(used)], parents[: len(used)], said[: len(used)]))
            continue
        place = {node: i for i, node in enumerate(used)}
        above = [-1, *[place[parents[node]] for node in used[1:]]]
        found.append(Proposal([tokens[node] for node in used], above, [said[node] for node in used]))
    return found


class Offer:
    """What a drafter proposes for every row. Lists are made of a tree where somebody asks for them, which few steps do.

    Args:
        found: the rows' proposals, or their trees.

    Attributes:
        num_nodes: of the largest tree, its root counted.
        reached: of each row the chance of each node's path, where it was asked for.
        num_worthy: nodes of each row that are worth their verification, if nobody else offers any.
        is_heard: whether any of it may be verified.
    """

    def __init__(self, found: DraftTree | list[Proposal]) -> None:
        self.tree = found if isinstance(found, DraftTree) else None
        self._rows = None if isinstance(found, DraftTree) else found
        self.num_nodes = found.num_nodes if isinstance(found, DraftTree) else max([len(each.tokens) for each in found])
        self.is_heard = self.num_nodes > 1
        self.reached: list[list[float]] = []
        self.num_worthy = 0

    @property
    def rows(self) -> list[Proposal]:
        """By row; a lone root where there is nothing for one."""
        if self._rows is None:
            assert self.tree is not None
            self._rows = proposals(self.tree)
        return self._rows


def follow(proposal: Proposal, tokens: Sequence[int]) -> list[int]:
    """The nodes along ``tokens``, the root first: as many as were proposed."""
    path, parents = [0], proposal.parents
    for token in tokens:
        above = path[-1]
        for node in range(above + 1, len(parents)):
            if parents[node] == above and proposal.tokens[node] == token:
                path.append(node)
                break
        else:
            break
    return path


@dataclass
class Union:
    """The union of the paths of several proposals, parents before their children.

    Attributes:
        claims: of each node what each drafter told of it, by drafter; empty for the root.
        speakers: of each node the drafters that proposed any child of it, a bit each.
        chances: of each node given its parent, all claims taken together; 1 for the root.
        reached: of each node's path.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    claims: list[dict[int, float]] = field(default_factory=lambda: [{}])
    speakers: list[int] = field(default_factory=lambda: [0])
    chances: list[float] = field(default_factory=lambda: [1.0])
    reached: list[float] = field(default_factory=lambda: [1.0])

    def makers(self, node: int) -> int:
        """Who proposed it, a bit each."""
        return sum(1 << drafter for drafter in self.claims[node])

    def weigh(self, chance: Callable[[Union, int], float]) -> None:
        """Give every node a chance given its parent; those of siblings add up to 1 at most, since one of them is right.

        Args:
            chance: of one node.
        """
        sums = [0.0] * len(self.tokens)
        self.chances = [1.0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            self.chances[node] = chance(self, node)
            sums[self.parents[node]] += self.chances[node]
        self.reached = [1.0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            above = self.parents[node]
            self.chances[node] /= max(sums[above], 1.0)
            self.reached[node] = self.reached[above] * self.chances[node]

    def ordered(self) -> list[int]:
        """All nodes, the likeliest first; parents come before their children, and equals in order of depth."""
        return sorted(range(len(self.tokens)), key=lambda node: (-self.reached[node], self.depths[node], node))

    def within(self, budget: Budget) -> list[int]:
        """The nodes that a fixed budget has room for, in the order of ``ordered``: see ``Budget``."""
        if budget.paths is not None or (budget.nodes is not None and budget.width > 1):
            return self.ordered()[: 1 + (len(budget.paths) if budget.paths is not None else budget.nodes or 0)]
        if budget.width == 1:
            return self._best_chain()
        room, kept = [budget.width] * (budget.depth + 1), {0}
        for node in self.ordered()[1:]:
            if self.parents[node] in kept and self.depths[node] <= budget.depth and room[self.depths[node]]:
                room[self.depths[node]] -= 1
                kept.add(node)
        return [node for node in self.ordered() if node in kept]

    def _best_chain(self) -> list[int]:
        """The path on which most tokens are to be expected."""
        count = len(self.tokens)
        value, chosen = list(self.reached), [PAD] * count
        for node in range(count - 1, 0, -1):  # descendants come later, so they are known
            above = self.parents[node]
            if chosen[node] != PAD:
                value[node] += value[chosen[node]]
            if chosen[above] == PAD or value[node] >= value[chosen[above]]:
                chosen[above] = node
        path, node = [0], chosen[0]
        while node != PAD:
            path.append(node)
            node = chosen[node]
        return path


def alone(proposal: Proposal, reached: Sequence[float], most: int) -> Union:
    """Of one proposal the ``most`` likely nodes, as they were told, in their order."""
    best = sorted(range(1, len(reached)), key=reached.__getitem__, reverse=True)[:most]
    kept = [0, *sorted([node for node in best if reached[node] > 0])]
    place = {node: i for i, node in enumerate(kept)}
    tokens, told = [proposal.tokens[node] for node in kept], [proposal.told[node] for node in kept]
    parents = [-1, *[place[proposal.parents[node]] for node in kept[1:]]]
    depths = [0]
    for above in parents[1:]:
        depths.append(depths[above] + 1)
    return Union(tokens, parents, depths, chances=told, reached=[reached[node] for node in kept])


def unite(given: Sequence[Proposal]) -> Union:
    """The union of paths, one proposal by drafter: a lone root where one has none. Equal siblings become one node."""
    union, children = Union([given[0].tokens[0]]), dict[tuple[int, int], int]()
    for drafter, proposal in enumerate(given):
        places = [0] * len(proposal.tokens)
        for node in range(1, len(proposal.tokens)):
            above, token = places[proposal.parents[node]], proposal.tokens[node]
            union.speakers[above] |= 1 << drafter
            found = children.get((above, token))
            if found is None:
                found = children[above, token] = len(union.tokens)
                union.tokens.append(token)
                union.parents.append(above)
                union.depths.append(union.depths[above] + 1)
                union.claims.append({})
                union.speakers.append(0)
            places[node] = found
            claims = union.claims[found]
            claims[drafter] = max(claims.get(drafter, 0.0), proposal.told[node])
    return union


def together(
    unions: Sequence[Union], kept: Sequence[Sequence[int]], device: torch.device, effort: float | None = None
) -> DraftTree:
    """The trees of the ``kept`` nodes of every row, parents first, as one batch."""
    width = max(map(len, kept))
    whole: list[list[list[int]]] = [[], []]
    chances: list[list[list[float]]] = [[], []]
    is_line = True
    for union, nodes in zip(unions, kept, strict=True):
        place, rest = {node: i for i, node in enumerate(nodes)}, width - len(nodes)
        parents = [-1, *[place[union.parents[node]] for node in nodes[1:]]]
        is_line &= parents == [*range(-1, len(nodes) - 1)]
        whole[0].append([*[union.tokens[node] for node in nodes], *[PAD] * rest])
        whole[1].append([*parents, *[-1] * rest])
        chances[0].append([*[union.reached[node] for node in nodes], *[0.0] * rest])
        chances[1].append([*[union.chances[node] for node in nodes], *[0.0] * rest])
    tokens_BN, parents_BN = torch.tensor(whole, device=device).unbind()
    reached_BN, told_BN = torch.tensor(chances, dtype=torch.float32, device=device).unbind()
    depth = max(union.depths[node] for union, nodes in zip(unions, kept, strict=True) for node in nodes)
    return DraftTree(tokens_BN, parents_BN, reached_BN, told=told_BN, effort=effort, is_line=is_line, depth=depth)


def by_row(trees: Sequence[DraftTree], chosen: Sequence[int]) -> DraftTree:
    """A batch whose rows are those of the chosen trees, q included."""
    places = sorted(set(chosen))
    if len(places) == 1:
        return trees[places[0]]
    used = {place: trees[place] for place in places}
    width = max(tree.num_nodes for tree in used.values())

    def joined(columns: Sequence[Tensor], filling: int) -> Tensor:
        kind = max((each.dtype for each in columns), key=lambda kind: kind.itemsize)
        sides = [(0, 0) * (each.ndim - 2) + (0, width - each.shape[1]) for each in columns]
        padded = [F.pad(each, side, value=filling).to(kind) for each, side in zip(columns, sides, strict=True)]
        found = dict(zip(places, padded, strict=True))
        return torch.stack([found[place][row] for row, place in enumerate(chosen)])

    tokens, parents = (joined([getattr(tree, of) for tree in used.values()], -1) for of in ("tokens", "parents"))
    is_line, depth = all(tree.is_line for tree in used.values()), max(tree.max_depth for tree in used.values())
    known = [tree.draft_probs for tree in used.values() if tree.draft_probs is not None]
    if not known or any(tree.draft_probs is None and tree.num_nodes > 1 for tree in used.values()):
        return DraftTree(tokens, parents, is_line=is_line, depth=depth)  # a rule that weighs q says what it misses
    nothing = known[0].new_zeros(len(chosen), 1, known[0].shape[2])
    laws = [nothing if tree.draft_probs is None else tree.draft_probs for tree in used.values()]
    return DraftTree(tokens, parents, None, joined(laws, 0), is_line=is_line, depth=depth)


def kept_tokens(tree: DraftTree, accepted: Accepted) -> list[list[int]]:
    """Of each row the tokens of the kept nodes."""
    if accepted.on_host is not None:
        return [emitted.tokens[:-1] for emitted in accepted.on_host]
    drafted = tree.tokens.gather(1, accepted.path.clamp(min=0)).tolist()
    return [tokens[1 : num + 1] for tokens, num in zip(drafted, accepted.num.tolist(), strict=True)]


def own_path(made: Sequence[Proposal], kept: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """(B, D + 1) the nodes of the ``kept`` tokens in a drafter's own numbers, as far as it proposed them; then PAD.

    Args:
        like: the same in the numbers of the whole tree.
    """
    paths, width = [follow(each, tokens) for each, tokens in zip(made, kept, strict=True)], like.shape[1]
    return torch.tensor([[*path, *[PAD] * (width - len(path))] for path in paths], device=like.device)
