"""The acceptance rules: which drafted nodes are kept, and the token that follows them.

    match          the target draws its own token at every node; descend while a child carries it
    match-top      the same over the draft's most probable tokens: the way of EAGLE-2 and -3, for comparison
    speculative    accept x with min(1, p(x)/q(x)), else the residual norm(max(0, p - q))     chains
    multi_round    siblings tried in turn, with or without replacement                         trees
    block          joint acceptance of the whole block, never worse than token by token         chains
    typical        Medusa's rule. Lossy: its output is not the target's distribution                 trees

``match`` with keyed noise is the default: its text does not depend on the draft at all, so that losslessness is
an equality. The classic rules keep the *distribution* of the text; each is a pure function of p, q and a ``Draws`` that
supplies the random decisions, so that the distribution can be computed exactly by walking through every outcome.

p = target, q = draft. Shape suffixes: B rows, N nodes, D depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from draftwing.errors import ConfigError, shown
from draftwing.noise import ACCEPT, hash_bits, uniform
from draftwing.sampling import SamplingBatch, on_host
from draftwing.tree import PAD, Accepted, DraftTree


class Draws(Protocol):
    """The random decisions of a classic rule; tests enumerate them, the decoder hashes them."""

    def accept(self, prob: float) -> bool:
        """True with probability ``prob``."""
        ...

    def pick(self, probs: Tensor) -> int:
        """An index with probability ``probs`` (V,), which sums to one."""
        ...


class KeyedDraws:
    """Uniform draws keyed on (seed, position of the step, number of the draw): no state outlives the step.

    Attributes:
        drawn: the number drawn by the last ``accept``.
    """

    def __init__(self, seed: int, position: int) -> None:
        self._seed, self._position, self._count, self.drawn = seed, position, 0, 0.0

    def _next(self) -> float:
        bits = hash_bits(self._seed, (ACCEPT, self._position, self._count), torch.zeros((), dtype=torch.int64))
        self._count += 1
        return float(uniform(bits))

    def accept(self, prob: float) -> bool:
        self.drawn = self._next()
        return self.drawn < prob

    def pick(self, probs: Tensor) -> int:
        mass = probs.double().cumsum(0)
        index = int(torch.searchsorted(mass, self._next() * float(mass[-1]), right=True))
        return min(index, int(probs.nonzero()[-1]))


# --- match -----------------------------------------------------------------------------------------------------------


def match_logits(tree: DraftTree, logits: Tensor, sampling: SamplingBatch, starts: Sequence[int]) -> Accepted | None:
    """The same as ``match``, of logits (B, N, V) with penalties and biases: the rest on the kept path alone.

    None where there is no kernel to do that.
    """
    return sampling.noise.match(tree, logits, sampling.drawing_seeds, starts, sampling.filters)


def match(tree: DraftTree, scores: Tensor, sampling: SamplingBatch, starts: Sequence[int]) -> Accepted:
    """Descend along the tokens that the target itself draws; the first that no child carries is the bonus.

    Exact at every temperature, for any tree. On an accelerator all rows at once and without a wait for the device; on
    a CPU, where operators on a handful of numbers cost more than the numbers, node by node, drawing on the path alone.

    Args:
        tree: the batch of trees.
        scores: (B, N, V) the target's processed scores after each node.
        sampling: the rows' sampling.
        starts: for each row the absolute position of the token after the root.
    """
    walked = sampling.noise.match(tree, scores, sampling.drawing_seeds, starts)
    if walked is not None:
        return walked
    if on_host(scores):
        return _walk(tree, scores, sampling, starts)
    drawn = sampling.draw(scores, tree.depths, starts, tree.max_depth)
    return _along(tree, drawn)


def _walk(tree: DraftTree, scores: Tensor, sampling: SamplingBatch, starts: Sequence[int]) -> Accepted:
    paths, bonuses = [], []
    for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        level, depth, drawn = [0], 0, {}
        while True:  # more than one node only where siblings are equal
            below = []
            for node in level:
                token = drawn[node] = sampling.draw_one(scores[row, node], row, starts[row] + depth)
                below += [i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token]
            if not below:
                break
            level, depth = sorted(below), depth + 1
        path = [level[0]]
        while path[0]:
            path.insert(0, parents[path[0]])
        paths.append(path)
        bonuses.append(drawn[path[-1]])
    width = max(map(len, paths))
    padded = [path + [PAD] * (width - len(path)) for path in paths]
    return Accepted(torch.tensor(padded), torch.tensor([len(path) - 1 for path in paths]), torch.tensor(bonuses))


def _along(tree: DraftTree, drawn: Tensor) -> Accepted:
    """The longest path whose every node is what its parent drew. ``drawn``: (B, N)."""
    if tree.num_nodes == 1:
        zeros = torch.zeros_like(drawn)
        return Accepted(zeros, zeros[:, 0], drawn[:, 0])
    wanted = drawn.gather(1, tree.parents.clamp(min=0))
    agrees = (tree.tokens == wanted) & tree.valid
    agrees[:, 0] = True
    return _deepest(tree, agrees, drawn)


def _deepest(tree: DraftTree, agrees: Tensor, drawn: Tensor) -> Accepted:
    """The deepest node all of whose ancestors agree; the first such where several do (equal siblings)."""
    alive = ~(tree.ancestors & ~agrees[:, None, :]).any(-1)
    # argmax of depth, and of the lowest index among equals: one key, since a depth is below num_nodes.
    index = torch.arange(tree.num_nodes, device=drawn.device)
    key = torch.where(alive, tree.depths * tree.num_nodes + (tree.num_nodes - 1 - index), -1)
    last = key.argmax(1, keepdim=True)
    num = tree.depths.gather(1, last)[:, 0]
    on_path = tree.ancestors.gather(1, last[:, :, None].expand(-1, -1, tree.num_nodes))[:, 0]
    path = torch.where(on_path, index, tree.num_nodes).sort(1).values[:, : tree.max_depth + 1]
    return Accepted(path.masked_fill(path == tree.num_nodes, PAD), num, drawn.gather(1, last)[:, 0])


# --- the classic rules: one row, pure functions ----------------------------------------------------------------------


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)); p itself where nothing is left (then the rejection that leads here has probability 0)."""
    left = (p - q).clamp(min=0)
    mass = left.sum()
    return left / mass if float(mass) > 0 else p


def without(q: Tensor, token: int) -> Tensor:
    """q with ``token`` taken out and renormalised; zeros where nothing is left."""
    left = q.clone()
    left[token] = 0.0
    mass = left.sum()
    return left / mass if float(mass) > 0 else left


def children_of(parents: Sequence[int], node: int) -> list[int]:
    """The children in the order in which they were drawn, which is the order in which they must be tried."""
    return [child for child in range(node + 1, len(parents)) if parents[child] == node]


def multi_round(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: Tensor,
    q: Tensor,
    draws: Draws,
    *,
    replacement: bool,
    on_try: Callable[[int, Tensor, Tensor, float, bool], None] = lambda *_: None,
) -> tuple[list[int], int]:
    """Recursive rejection sampling over siblings: SpecInfer (2305.09781), Sequoia alg. 2 (2402.12374).

    On a chain this is speculative sampling (Leviathan 2211.17192, Chen 2302.01318).

    Args:
        tokens, parents: one row's tree without unused nodes.
        p: (N, V) the target's distribution after each node.
        q: (N, V) the draft distribution from which each node's children were drawn.
        draws: the random decisions.
        replacement: whether siblings were drawn independently; else q loses each tried token.
        on_try: called with every tried node, p and q (V,) then, the probability of keeping it, and True if it was kept.

    Returns:
        The kept nodes (root first) and the bonus token.
    """
    path = [0]
    while True:
        node = path[-1]
        target, draft = p[node], q[node]
        for child in children_of(parents, node):
            token = tokens[child]
            above, below = float(target[token]), float(draft[token])
            prob = min(1.0, above / below) if below > 0 else float(above > 0)
            is_kept = draws.accept(prob)
            on_try(child, target, draft, prob, is_kept)
            if is_kept:
                path.append(child)
                break
            target = residual(target, draft)
            if not replacement:
                draft = without(draft, token)
        else:
            return path, draws.pick(target)


def block(tokens: Sequence[int], parents: Sequence[int], p: Tensor, q: Tensor, draws: Draws) -> tuple[list[int], int]:
    """Block verification of a chain (Sun et al., 2403.10444): keeps at least as many tokens in expectation."""
    length = len(tokens) - 1
    joint, keeps, reach = 1.0, [], [1.0]
    for i in range(length + 1):
        if i > 0:
            above, below = float(p[i - 1][tokens[i]]), float(q[i - 1][tokens[i]])
            joint = min(joint * above / below, 1.0) if below > 0 else float(above > 0)
            reach.append(joint)
        if i < length:
            mass = float((joint * p[i] - q[i]).clamp(min=0).sum())
            keeps.append(mass / (mass + (1 - joint)) if mass > 0 else 0.0)
        else:
            keeps.append(joint)
    # Independent decisions, so the largest kept i is found from the end; 0 is kept where nothing else is.
    kept = next((i for i in range(length, 0, -1) if draws.accept(keeps[i])), 0)
    distribution = p[kept] if kept == length else residual(reach[kept] * p[kept], q[kept])
    return list(range(kept + 1)), draws.pick(distribution)


# --- lossy -----------------------------------------------------------------------------------------------------------


def typical(
    tree: DraftTree,
    scores: Tensor,
    sampling: SamplingBatch,
    starts: Sequence[int],
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Accepted:
    """Medusa's typical acceptance (2401.10774): keep x where p(x) > min(epsilon, delta * exp(-H(p))). Lossy."""
    probs = sampling.probs(scores)
    entropy = torch.special.entr(probs).sum(-1, keepdim=True)
    threshold = torch.minimum(torch.full_like(entropy, epsilon), delta * torch.exp(-entropy))
    drawn = sampling.draw(scores, tree.depths, starts, tree.max_depth)
    if tree.num_nodes == 1:
        return _along(tree, drawn)
    above = probs.gather(1, tree.parents.clamp(min=0)[:, :, None].expand_as(probs))
    floor = threshold.gather(1, tree.parents.clamp(min=0)[:, :, None])[:, :, 0]
    agrees = (above.gather(2, tree.tokens.clamp(min=0)[:, :, None])[:, :, 0] > floor) & tree.valid
    agrees[:, 0] = True
    return _deepest(tree, agrees, drawn)


# --- the table -------------------------------------------------------------------------------------------------------

AcceptRule = Callable[[DraftTree, Tensor, SamplingBatch, Sequence[int]], Accepted]
PureRule = Callable[[Sequence[int], Sequence[int], Tensor, Tensor, Draws], tuple[list[int], int]]


def _rowwise(pure: PureRule) -> AcceptRule:

    def rule(tree: DraftTree, scores: Tensor, sampling: SamplingBatch, starts: Sequence[int]) -> Accepted:
        if tree.draft_probs is None and tree.num_nodes > 1:
            raise ConfigError(
                "this rule weighs the draft's probabilities, and the drafter gives none: "
                "use rule='match', or a drafter that draws its children (a causal LM)"
            )
        p = sampling.probs(scores).double().cpu()
        q = p if tree.draft_probs is None else tree.draft_probs.double().cpu()
        paths, bonuses = [], []
        for b, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            used = [i for i, token in enumerate(tokens) if token != PAD]
            place = {node: i for i, node in enumerate(used)}
            row_parents = [place.get(parents[i], -1) for i in used]
            draws = KeyedDraws(sampling.seeds[b], starts[b])
            path, bonus = pure([tokens[i] for i in used], row_parents, p[b, used], q[b, used], draws)
            if bool(p[b, used[path[-1]]].isnan().any()):  # NaN is not a distribution: pass it on, it wins every max
                bonus = int(scores[b, used[path[-1]]].argmax())
            paths.append([used[i] for i in path])
            bonuses.append(bonus)
        width = max(map(len, paths))
        device = tree.tokens.device
        return Accepted(
            path=torch.tensor([[*path, *[PAD] * (width - len(path))] for path in paths], device=device),
            num=torch.tensor([len(path) - 1 for path in paths], device=device),
            bonus=torch.tensor(bonuses, device=device),
        )

    return rule


@dataclass(frozen=True)
class Rule:
    """An acceptance rule and what it asks of the drafter.

    Attributes:
        apply: the rule over a batch.
        early: the same of scores to which temperatures and filters are yet to be applied, where it can; else None.
        is_match: the rule is ``match``, which the target's forward may apply itself.
        lossless: whether the distribution of the text is the target's.
        children: how a drafter must choose a node's children: ``keyed`` (any way; best with the target's own
            noise), ``top`` (the best of q), ``sampled`` (independent draws of q), ``distinct`` (draws of q without
            replacement).
        chain_only: whether every node may have one child at most.
    """

    name: str
    apply: AcceptRule
    lossless: bool = True
    children: str = "keyed"
    chain_only: bool = False
    early: Callable[[DraftTree, Tensor, SamplingBatch, Sequence[int]], Accepted | None] = lambda *_: None
    is_match: bool = False


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("match", match, early=match_logits, is_match=True),
        Rule("match-top", match, children="top", early=match_logits, is_match=True),
        Rule("speculative", _rowwise(partial(multi_round, replacement=True)), children="sampled", chain_only=True),
        Rule("multi-round", _rowwise(partial(multi_round, replacement=False)), children="distinct"),
        Rule("multi-round-replacement", _rowwise(partial(multi_round, replacement=True)), children="sampled"),
        Rule("block", _rowwise(block), children="sampled", chain_only=True),
        Rule("typical", typical, lossless=False),
    )
}


def get_rule(name: str | Rule, *, lossless: bool = True) -> Rule:
    """Look a rule up by name; one that is a rule already is only checked.

    Raises:
        ConfigError: an unknown name, or a lossy rule while ``lossless`` is asked for.
    """
    if not isinstance(lossless, bool):
        raise ConfigError(f"lossless must be True or False, found {shown(lossless)}")
    rule = RULES.get(name) if isinstance(name, str) else name
    if not isinstance(rule, Rule):
        raise ConfigError(f"unknown acceptance rule {shown(name)}: choose one of {', '.join(RULES)}")
    if lossless and not rule.lossless:
        raise ConfigError(
            f"rule {rule.name!r} changes what the target says: pass lossless=False to accept that; "
            f"every report will say so"
        )
    return rule
