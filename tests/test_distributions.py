"""The classic rules keep the target's distribution: proven over every outcome, including the draft's draws."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from draftwing import accept
from draftwing.accept import RULES, KeyedDraws, block, multi_round
from draftwing.noise import KeyedNoise
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import PAD, DraftTree

NextToken = Callable[[tuple[int, ...]], Tensor]  # (V,) probabilities after a path
KINDS = ("random", "zeros", "equal", "rounded", "one-hot p", "one-hot q", "disjoint", "mixed")
RULE = {
    "with replacement": partial(multi_round, replacement=True),
    "without replacement": partial(multi_round, replacement=False),
    "block": block,
}


# --- every outcome ---------------------------------------------------------------------------------------------------


class Enumerated:
    """Random decisions that follow a script, then take the first that is possible, and note what else was."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script, self.taken, self.prob = script, [], 1.0
        self.others: list[tuple[int, ...]] = []

    def _decide(self, probs: list[float]) -> int:
        possible = [choice for choice, prob in enumerate(probs) if prob > 0]
        number = len(self.taken)
        if number < len(self.script):
            choice = self.script[number]
        else:
            choice = possible[0] if possible else 0  # a distribution without mass: this outcome is lost
            self.others += [(*self.taken, other) for other in possible[1:]]
        self.taken.append(choice)
        self.prob *= probs[choice]
        return choice

    def accept(self, prob: float) -> bool:
        return self._decide([1 - prob, prob]) == 1

    def pick(self, probs: Tensor) -> int:
        return self._decide(probs.tolist())


def outcomes(run: Callable[[Enumerated], tuple[int, ...]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every outcome of ``run`` with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        draws = Enumerated(scripts.pop())
        result = run(draws)
        scripts += draws.others
        yield draws.prob, result


def shapes(num_nodes: int) -> list[list[int]]:
    """The parents of every ordered tree, in breadth-first order."""
    found = [[-1]]
    for node in range(1, num_nodes):
        found = [[*parents, parent] for parents in found for parent in range(max(parents[-1], 0), node)]
    return found


def depth_of(parents: list[int]) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def tables(kind: str, vocab: int, seed: int) -> tuple[NextToken, NextToken]:
    """p and q after every path, random or degenerate; ``mixed`` takes another kind after each path."""
    made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def simplex(rng: random.Random, support: list[int]) -> Tensor:
        weights = [rng.random() ** 2 + 0.01 if token in support else 0.0 for token in range(vocab)]
        return torch.tensor(weights, dtype=torch.float64) / sum(weights)

    def make(path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if path not in made:
            rng = random.Random(f"{seed} {kind} {path}")
            here = rng.choice(KINDS[:-1]) if kind == "mixed" else kind
            everything = list(range(vocab))
            cut = rng.randint(1, vocab - 1)
            rng.shuffle(everything)
            some, rest = everything[:cut], everything[cut:]
            p = simplex(rng, {"zeros": some, "one-hot p": some[:1], "disjoint": some}.get(here, everything))
            q = simplex(rng, {"zeros": everything[1:], "one-hot q": rest[:1], "disjoint": rest}.get(here, everything))
            made[path] = (p, {"equal": p, "rounded": p / 3 * 3}.get(here, q))  # equal, or but for the last bit
        return made[path]

    return lambda path: make(path)[0], lambda path: make(path)[1]


def grow(parents: list[int], q: NextToken, draws: Enumerated, *, replacement: bool):
    """Fill a shape from the top with draws of q; children for whom q has nothing left are not there."""
    paths: list[tuple[int, ...] | None] = [()]
    tokens, kept_parents, place = [0], [-1], {0: 0}
    left: dict[int, Tensor] = {}
    for node, parent in enumerate(parents[1:], 1):
        above = paths[parent]
        distribution = None if above is None else left.setdefault(parent, q(above))
        if distribution is None or float(distribution.sum()) == 0:
            paths.append(None)
            continue
        token = draws.pick(distribution)
        if not replacement:
            distribution = distribution.clone()
            distribution[token] = 0.0
            left[parent] = distribution / distribution.sum() if float(distribution.sum()) > 0 else distribution
        paths.append((*above, token))
        place[node] = len(tokens)
        tokens.append(token)
        kept_parents.append(place[parent])
    return tokens, kept_parents, [path for path in paths if path is not None]


def deviation(rule: str, parents: list[int], p: NextToken, q: NextToken, vocab: int) -> float:
    """The largest difference between the distribution of the first depth + 1 emitted tokens and p's."""

    def run(draws: Enumerated) -> tuple[int, ...]:
        tokens, above, paths = grow(parents, q, draws, replacement=rule != "without replacement")
        distributions = torch.stack([p(path) for path in paths]), torch.stack([q(path) for path in paths])
        path, bonus = RULE[rule](tokens, above, *distributions, draws)
        return (*(tokens[node] for node in path[1:]), bonus)

    mass: dict[tuple[int, ...], float] = defaultdict(float)
    for prob, emitted in outcomes(run):
        mass[emitted] += prob
    worst = 0.0
    length = depth_of(parents) + 1
    for text in product(range(vocab), repeat=length):
        steps = [float(p(text[:i])[text[i]]) for i in range(length)]
        found, ahead = 0.0, 1.0  # an outcome of fewer tokens goes on as p does
        for end in range(length, 0, -1):
            found += mass.get(text[:end], 0.0) * ahead
            ahead *= steps[end - 1]
        worst = max(worst, abs(found - ahead))
    return worst


def test_there_is_every_shape():
    assert [len(shapes(n)) for n in range(1, 7)] == [1, 1, 2, 5, 14, 42]  # Catalan numbers


TREES = [parents for n in range(1, 7) for parents in shapes(n)]
CHAINS = [list(range(-1, depth)) for depth in range(5)]


@pytest.mark.parametrize(("kind", "vocab"), [*((kind, 3) for kind in KINDS), ("mixed", 4)])
@pytest.mark.parametrize("rule", ["with replacement", "without replacement"])
def test_multi_round_keeps_the_distribution_on_every_tree(rule, kind, vocab):
    # All trees of up to five nodes, or four: ``mixed`` has every other kind somewhere. And some of six.
    more = 23 if (kind, rule, vocab) == ("mixed", "without replacement", 3) else len(TREES)
    for number, parents in enumerate([*TREES[: 23 if kind == "mixed" else 9], *TREES[more::3]]):
        assert deviation(rule, parents, *tables(kind, vocab, number), vocab) < 1e-12, parents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["with replacement", "block"])
def test_chains_keep_the_distribution(rule, kind):
    """On a chain ``with replacement`` is speculative sampling."""
    for parents in CHAINS[:4]:
        for seed in range(2):
            assert deviation(rule, parents, *tables(kind, 3, seed), 3) < 1e-12, parents
        assert deviation(rule, parents[:3], *tables(kind, 4, 9), 4) < 1e-12, parents
    assert deviation(rule, CHAINS[4], *tables(kind, 3, 5), 3) < 1e-12


def mean_kept(rule: str, parents: list[int], p: NextToken, q: NextToken) -> float:
    def run(draws: Enumerated) -> tuple[int, ...]:
        tokens, above, paths = grow(parents, q, draws, replacement=True)
        distributions = torch.stack([p(path) for path in paths]), torch.stack([q(path) for path in paths])
        return (len(RULE[rule](tokens, above, *distributions, draws)[0]) - 1,)

    return sum(prob * kept for prob, (kept,) in outcomes(run))


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_is_what_the_papers_promise(kind):
    """One draft is kept with 1 - TV(p, q); a block keeps at least as many as token by token, and they agree on one."""
    gained = 0.0
    for seed in range(4):
        p, q = tables(kind, 3, seed)
        overlap = float(torch.minimum(p(()), q(())).sum())
        for rule in ("with replacement", "block"):
            assert mean_kept(rule, [-1, 0], p, q) == pytest.approx(overlap, abs=1e-12)
        blocked, one_by_one = (mean_kept(rule, CHAINS[3], p, q) for rule in ("block", "with replacement"))
        assert blocked >= one_by_one - 1e-12
        gained = max(gained, blocked - one_by_one)
    assert gained > 1e-3 or kind != "random"


# --- the proof sees mistakes -----------------------------------------------------------------------------------------

RESIDUAL = {"residual": lambda p, q: (p - q).clamp(min=0)}
ORDER = {"children_of": lambda parents, node: accept_children(parents, node)[::-1]}
TRIED = {"without": lambda q, token: q}
accept_children = accept.children_of
MUTATIONS = {
    "residual not normalised, tree": (RESIDUAL, "without replacement", [-1, 0, 0]),
    "residual not normalised, replacement": (RESIDUAL, "with replacement", [-1, 0, 0]),
    "residual not normalised, chain": (RESIDUAL, "with replacement", [-1, 0, 1]),
    "residual not normalised, block": (RESIDUAL, "block", [-1, 0, 1]),
    "no residual": ({"residual": lambda p, q: p}, "with replacement", [-1, 0]),
    "siblings in the wrong order": (ORDER, "without replacement", [-1, 0, 0]),
    "q keeps the tried token": (TRIED, "without replacement", [-1, 0, 0]),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_changes_the_distribution(name, monkeypatch):
    patches, rule, parents = MUTATIONS[name]

    def worst() -> float:
        return max(deviation(rule, parents, *tables("random", 3, seed), 3) for seed in range(5))

    assert worst() < 1e-12
    for function, mutant in patches.items():
        monkeypatch.setattr(accept, function, mutant)
    assert worst() > 1e-3


# --- the rules as the decoder calls them -----------------------------------------------------------------------------


class Remembered(KeyedDraws):
    """Keyed draws that note the distributions that were picked from."""

    distributions: list[Tensor] = []  # noqa: RUF012  # shared on purpose: the rule makes its own draws

    def pick(self, probs: Tensor) -> int:
        self.distributions.append(probs)
        return super().pick(probs)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.children in ("sampled", "distinct")])
def test_a_batch_of_ragged_trees_is_its_rows_one_by_one(rule, monkeypatch):
    """Unused nodes anywhere change nothing, and the indices that come back are those of the padded tree."""
    monkeypatch.setattr(accept, "KeyedDraws", Remembered)
    rng = random.Random(3)
    vocab, chain = 5, RULES[rule].chain_only
    pure = {"speculative": RULE["with replacement"], "multi-round": RULE["without replacement"], "block": block}.get(
        rule, RULE["with replacement"]
    )
    for _ in range(20):
        rows = []
        for _ in range(3):
            num, parents = rng.randint(1, 5), [-1]
            parents += [node - 1 if chain else rng.randrange(node) for node in range(1, num)]
            places = [0, *sorted(rng.sample(range(1, 8), num - 1))]
            rows.append(([rng.randrange(vocab) for _ in range(num)], parents, places))
        tokens, parents = torch.full((3, 8), PAD), torch.full((3, 8), -1)
        for b, (row, above, places) in enumerate(rows):
            tokens[b, places] = torch.tensor(row)
            parents[b, places] = torch.tensor([places[parent] if parent >= 0 else -1 for parent in above])
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        scores = torch.randn(3, 8, vocab, dtype=torch.float64, generator=generator)
        q = torch.randn(3, 8, vocab, dtype=torch.float64, generator=generator).softmax(-1)
        sampling = SamplingBatch([Sampling(temperature=1.0, seed=b) for b in range(3)], KeyedNoise(vocab))
        starts = [rng.randrange(100) for _ in range(3)]
        accepted = RULES[rule].apply(DraftTree(tokens, parents, None, q), scores, sampling, starts)
        for b, (row, above, places) in enumerate(rows):
            draws = KeyedDraws(b, starts[b])
            path, bonus = pure(row, above, scores[b, places].softmax(-1), q[b, places], draws)
            assert accepted.path[b, : len(path)].tolist() == [places[node] for node in path]
            assert set(accepted.path[b, len(path) :].tolist()) <= {PAD}
            assert int(accepted.num[b]) == len(path) - 1
            assert int(accepted.bonus[b]) == bonus
    assert all(float(distribution.sum()) == pytest.approx(1.0, abs=1e-12) for distribution in Remembered.distributions)


def random_trees(seed: int, vocab: int) -> DraftTree:
    """Three ragged trees of any shape over few tokens: many siblings are equal, and some nodes are unused."""
    rng, rows = random.Random(seed), []
    for _ in range(3):
        tokens, parents, used = [0], [-1], [0]
        for node in range(1, rng.randint(2, 14)):
            skipped = rng.random() < 0.15
            tokens.append(PAD if skipped else rng.randrange(vocab))
            parents.append(-1 if skipped else rng.choice(used[-3:] if rng.random() < 0.7 else used))
            used += [] if skipped else [node]
        rows.append((tokens, parents))
    return DraftTree.from_lists(*zip(*rows, strict=True))


def descend(tree: DraftTree, row: int, keeps: Callable[[int], bool]) -> list[int]:
    """The path to the deepest node whose every ancestor is kept too, by brute force: the first of several."""
    paths = {0: [0]}
    for node, parent in enumerate(tree.parents[row].tolist()):
        if parent in paths and keeps(node):
            paths[node] = [*paths[parent], node]
    return max(paths.values(), key=len)  # of equally long ones the first, whose last node has the lowest index


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_match_keeps_the_first_of_the_deepest_paths(temperature, monkeypatch):
    """Node by node on the host, and all at once as on a device: the tokens that the target draws along the path."""
    vocab, num_ties = 3, 0
    for seed in range(150):
        tree = random_trees(seed, vocab)
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(*tree.tokens.shape, vocab, dtype=torch.float64, generator=generator)
        sampling = SamplingBatch([Sampling(temperature=temperature, seed=b) for b in range(3)], KeyedNoise(vocab))
        starts = [seed, 5, 7]
        drawn = sampling.draw(scores, tree.depths, starts, tree.max_depth)
        for is_host in (True, False):
            monkeypatch.setattr(accept, "on_host", lambda tensor, is_host=is_host: is_host)
            found = accept.match(tree, scores, sampling, starts)
            for row in range(3):
                tokens, parents, own = (x[row].tolist() for x in (tree.tokens, tree.parents, drawn))
                path = descend(tree, row, lambda node: tokens[node] == own[parents[node]])  # noqa: B023
                assert found.path[row][: len(path)].tolist() == path
                assert set(found.path[row][len(path) :].tolist()) <= {PAD}
                assert (int(found.num[row]), int(found.bonus[row])) == (len(path) - 1, own[path[-1]])
                siblings = [tokens[node] for node in range(len(tokens)) if parents[node] == parents[path[-1]]]
                num_ties += len(path) > 1 and siblings.count(tokens[path[-1]]) > 1
    assert num_ties > 50


def test_typical_keeps_what_is_likely_enough():
    """p(x) above min(epsilon, delta * exp(-H)), at every node of the path; the bonus is the target's own draw."""
    vocab, kept, left = 6, 0, 0
    for seed in range(60):
        tree = random_trees(seed, vocab)
        generator = torch.Generator().manual_seed(seed)
        scores = 2.5 * torch.randn(*tree.tokens.shape, vocab, dtype=torch.float64, generator=generator)
        sampling = SamplingBatch([Sampling(temperature=1.0, seed=b) for b in range(3)], KeyedNoise(vocab))
        found = RULES["typical"].apply(tree, scores, sampling, [3, 4, 5])
        drawn = sampling.draw(scores, tree.depths, [3, 4, 5], tree.max_depth)
        for row in range(3):
            tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()

            def keeps(node: int, own=scores[row], tokens=tokens, parents=parents) -> bool:
                p = own[parents[node]].softmax(-1).tolist()
                entropy = -sum(each * math.log(each) for each in p)
                return p[tokens[node]] > min(0.09, 0.3 * math.exp(-entropy))

            path = descend(tree, row, keeps)
            assert found.path[row][: len(path)].tolist() == path
            assert (int(found.num[row]), int(found.bonus[row])) == (len(path) - 1, int(drawn[row, path[-1]]))
            kept, left = kept + len(path) - 1, left + sum(token != PAD for token in tokens) - len(path)
    assert min(kept, left) > 100


def test_the_largest_draw_is_the_last_token_that_may_be(monkeypatch):
    """Rounding may carry a draw beyond the sum of all probabilities."""
    monkeypatch.setattr("draftwing.accept.uniform", lambda bits: torch.ones(()))
    assert KeyedDraws(1, 0).pick(torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])) == 3


def test_keyed_draws_have_their_probabilities():
    p = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.2, 0.0])
    picks = torch.bincount(torch.tensor([KeyedDraws(1, position).pick(p) for position in range(1500)]), minlength=6)
    assert picks[[0, 3, 5]].tolist() == [0, 0, 0]
    used = p > 0
    assert float(((picks - 1500 * p)[used] ** 2 / (1500 * p[used])).sum()) < 13.8  # 99.9% of 2 degrees of freedom
    draws = KeyedDraws(1, 0)
    taken = sum(draws.accept(0.3) for _ in range(1500))
    assert abs(taken - 450) < 3.5 * (1500 * 0.3 * 0.7) ** 0.5
    assert all(KeyedDraws(seed, 0).accept(1.0) and not KeyedDraws(seed, 0).accept(0.0) for seed in range(100))
    first, second = KeyedDraws(4, 9), KeyedDraws(4, 9)
    assert [first.pick(p) for _ in range(20)] == [second.pick(p) for _ in range(20)]
