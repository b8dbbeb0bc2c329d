"""Tree growth against explicit search over a fake net: nodes, their order, chances and q."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch

from draftwing.errors import ConfigError
from draftwing.methods.base import EAGLE_TREE, Budget
from draftwing.methods.calibration import Calibration
from draftwing.models.context import Context, Row
from draftwing.noise import KeyedNoise
from draftwing.runtime.tree_builder import TreeBuilder, static_levels
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import PAD, DraftTree
from pairwise import cover, groups_of

VOCAB = 11
PROMPTS = ((4, 7, 7, 1), (9,), (3, 8, 2, 5, 8, 0))
GREEDY = Sampling()
CALIBRATION = Calibration(1.9, 0.15, 1.3)
SAMPLINGS = {
    "greedy": [Sampling(seed=b) for b in range(3)],
    "t1": [Sampling(temperature=1.0, seed=b) for b in range(3)],
    "mixed": [Sampling(seed=1), Sampling(temperature=0.6, seed=2), Sampling(temperature=1.3, seed=3)],
    "penalties": [
        Sampling(temperature=t, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5, seed=b)
        for b, t in enumerate((0.0, 0.8, 1.0))
    ],
}
# The third has ranks that no other of its level has, and a leaf before a node with children.
TREES = {
    "eagle": EAGLE_TREE,
    "chain": ((0,), (0, 0), (0, 0, 0)),
    "bush": ((2,), (0,), (5,), (2, 1), (2, 1, 3), (5, 0), (2, 0), (2, 0, 0), (5, 0, 4)),
}


def random_distribution(seed: int, vocab: int = VOCAB, scale: float = 2.0):
    """Logits of the token after (prompt, path): always the same ones."""

    @cache
    def distribution(prompt: tuple[int, ...], path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, prompt, 0, path)) % 2**63)
        return torch.randn(vocab, generator=generator, dtype=torch.float64) * scale

    return distribution


def paths_of(tree: DraftTree, row: int = 0) -> dict[int, tuple[int, ...]]:
    """The tokens from the root down to each used node, by node."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(tokens)):
        if tokens[node] != PAD:
            paths[node] = (*paths[parents[node]], tokens[node])
    return paths


def grow(
    distribution, budget, requests=None, prompts=PROMPTS, wanted=None, vocab=VOCAB
) -> tuple[DraftTree, TreeBuilder]:
    """Grow trees as a drafter does, with ``distribution`` as its network."""
    requests = requests or [GREEDY] * len(prompts)
    ctx = Context(torch.device("cpu"), [Row(list(prompt), len(prompt) - 1, len(prompt)) for prompt in prompts])
    sampling = SamplingBatch(requests, KeyedNoise(vocab))
    active, starts = wanted or [True] * len(prompts), [len(prompt) for prompt in prompts]
    history = ctx.history() if sampling.penalises else None
    growth = TreeBuilder(
        ctx.pending(), active, starts, sampling, budget, CALIBRATION, history=history, wants_places=True
    )
    drafted, first = DraftTree.root(ctx.pending()), 0
    unused = torch.linspace(50, -50, vocab, dtype=torch.float64)  # what is forwarded for no node must not matter
    while True:
        paths = [paths_of(drafted, row) for row in range(len(prompts))]
        nodes = range(first, drafted.num_nodes)
        logits = [
            torch.stack([distribution(prompt, known[node]) if node in known else unused for node in nodes])
            for prompt, known in zip(prompts, paths, strict=True)
        ]
        growth.extend(torch.stack(logits))
        if growth.level == growth.depth:
            return growth.finish().tree, growth
        drafted, first = growth.expanded(), growth.first
        drafted.check(vocab)
        assert (drafted.parents[~drafted.valid] == -1).all()


# --- explicit search -------------------------------------------------------------------------------------------------


def scores_of(distribution, request: Sampling, prompt, path) -> list[float]:
    """Penalties and temperature, token by token."""
    scores, text = distribution(prompt, path).tolist(), [*prompt, *path]
    written = Counter(path)  # of the prompt repetition alone is counted
    for token in range(len(scores)):
        if token in text:
            scores[token] *= request.repetition_penalty ** (-1 if scores[token] > 0 else 1)
        scores[token] -= request.frequency_penalty * written[token]
        scores[token] -= request.presence_penalty * (written[token] > 0)
    return [score / (request.temperature or 1.0) for score in scores]


def slow_children(distribution, request: Sampling, prompt, path, how: str = "keyed") -> list[tuple[int, float]]:
    """All tokens after a path, the best first, with the log of their chance."""
    scores = scores_of(distribution, request, prompt, path)
    ranked, sharpness, rivals, miss = scores, 1.0, len(scores), 0.0
    if how == "keyed" and request.temperature > 0:
        # The target draws the token at this position as the argmax of its own scores and this very noise.
        noise = KeyedNoise(len(scores)).at(request.seed, len(prompt) + len(path)).tolist()
        ranked = [CALIBRATION.scale * score + each for score, each in zip(scores, noise, strict=True)]
        sharpness, rivals, miss = CALIBRATION.sharpness, 8, CALIBRATION.miss
    best = sorted(ranked, reverse=True)[:rivals]
    norm = math.log(sum(math.exp(sharpness * (score - best[0])) for score in best)) + sharpness * best[0]
    order = sorted(range(len(scores)), key=lambda token: -ranked[token])
    return [(token, sharpness * ranked[token] - norm + math.log(1 - miss)) for token in order]


def slow_dynamic(children, budget: Budget) -> dict[tuple[int, ...], float]:
    """EAGLE-2: expand the ``width`` best of each level, keep the ``nodes`` best of all that were met."""
    level, met = [((), 0.0)], []
    for _ in range(budget.depth):
        born = [
            ((*path, token), value + chance)
            for path, value in level
            for token, chance in children(path)[: budget.width]
        ]
        level = sorted(born, key=lambda node: -node[1])[: budget.width]
        met += level if budget.nodes is None else born
    met.sort(key=lambda node: (-node[1], len(node[0])))
    return dict(met[: budget.nodes])


def assert_tree(tree: DraftTree, row: int, wanted: dict[tuple[int, ...], float], children=None) -> None:
    """These paths and no others, with these log chances; siblings in the order of ``children``."""
    tree.check()
    paths = paths_of(tree, row)
    found = {path: float(tree.confidence[row, node]) for node, path in paths.items() if node}
    assert found == pytest.approx({path: math.exp(value) for path, value in wanted.items()}, abs=1e-5)
    for path in set(paths.values()) if children else ():
        siblings = [below[-1] for below in paths.values() if below and below[:-1] == path]
        assert siblings == [token for token, _ in children(path) if token in siblings]


SEARCHED = {
    "budget": [(1, 3), (3, 3), (4, 2, 5), (3, 4, 9), (2, 4, 99), (5, 3, 1)],
    "kind": tuple(SAMPLINGS),
    "how": ("keyed", "top"),
}


@pytest.mark.parametrize(tuple(SEARCHED), cover(SEARCHED, groups_of(SEARCHED, 2)), ids=str)
def test_dynamic_trees_are_those_of_a_search_level_by_level(budget, kind, how):
    distribution, budget = random_distribution(1), Budget(*budget, children=how)
    tree, _ = grow(distribution, budget, SAMPLINGS[kind])
    tree.check(VOCAB)
    assert tree.tokens[:, 0].tolist() == [prompt[-1] for prompt in PROMPTS]
    for row, (prompt, request) in enumerate(zip(PROMPTS, SAMPLINGS[kind], strict=True)):

        def children(path, prompt=prompt, request=request):
            return slow_children(distribution, request, prompt, path, how)

        assert_tree(tree, row, slow_dynamic(children, budget), children)


@pytest.mark.parametrize("seed", range(4))
def test_with_a_level_as_wide_as_the_tree_nothing_better_is_missed(seed):
    """A best-first search over every path there is: its N best all survive on levels of N."""
    distribution, vocab, depth = random_distribution(seed, vocab=4), 4, 3
    tree, _ = grow(distribution, Budget(depth, 6, 6), prompts=PROMPTS[:1], vocab=vocab)
    values = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(vocab), repeat=length):
            steps = [distribution(PROMPTS[0], path[:i]).log_softmax(-1)[path[i]].item() for i in range(length)]
            values[path] = sum(steps)
    assert_tree(tree, 0, dict(sorted(values.items(), key=lambda node: -node[1])[:6]))


def distribution_of(chances: dict[tuple[int, ...], dict[int, float]]):
    """A distribution given by its probabilities; after paths that are not named every token is as likely."""

    def distribution(prompt, path) -> torch.Tensor:
        probs = chances.get(path, dict.fromkeys(range(VOCAB), 1 / VOCAB))
        return torch.tensor([probs.get(token, 0.0) for token in range(VOCAB)], dtype=torch.float64).log()

    return distribution


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [(3, [(), (1,), (3,), (8,)]), (5, [(), (1,), (3,), (3, 5), (3, 6), (8,)])],
)
def test_equals_go_to_the_shallower_node(nodes, wanted):
    """The sibling at 1/4 is kept before the grandchild at 1/2 * 1/2, at any place."""
    distribution = distribution_of({(): {3: 0.5, 8: 0.25, 1: 0.25}, (3,): {5: 0.5, 6: 0.5}})
    assert sorted(paths_of(grow(distribution, Budget(2, 3, nodes), prompts=PROMPTS[:1])[0]).values()) == wanted


@pytest.mark.parametrize("nodes", range(1, 6))
def test_a_child_as_sure_as_its_parent_never_stands_without_it(nodes):
    sure = {tuple(range(length)): {length: 1.0} for length in range(6)}
    tree, _ = grow(distribution_of(sure), Budget(5, 2, nodes), prompts=PROMPTS[:1])
    tree.check(VOCAB)
    assert sorted(paths_of(tree).values()) == [tuple(range(length)) for length in range(nodes + 1)]
    assert tree.confidence[0].tolist() == [1.0] * (nodes + 1)


@pytest.mark.parametrize("nodes", [1, 5, 6, 9, 20])
def test_equal_chances_fill_level_after_level(nodes):
    tree, _ = grow(distribution_of({}), Budget(3, 5, nodes), prompts=PROMPTS[:1])
    tree.check(VOCAB)
    depths = Counter(len(path) for path in paths_of(tree).values())
    assert depths == Counter({0: 1, 1: min(nodes, 5), 2: min(max(nodes - 5, 0), 25)}) - Counter()


# --- static trees ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("name", TREES)
def test_static_trees_are_made_of_ranks(name, kind):
    distribution, paths = random_distribution(2), TREES[name]
    tree, _ = grow(distribution, Budget(paths=paths), SAMPLINGS[kind])
    order = sorted(paths, key=lambda path: (len(path), path))
    for row, (prompt, request) in enumerate(zip(PROMPTS, SAMPLINGS[kind], strict=True)):
        places, wanted = {(): (0, (), 0.0)}, {}
        for node, ranks in enumerate(order, 1):
            parent, above, value = places[ranks[:-1]]
            token, chance = slow_children(distribution, request, prompt, above)[ranks[-1]]
            places[ranks] = (node, (*above, token), value + chance)
            wanted[*above, token] = value + chance
            assert (int(tree.tokens[row, node]), int(tree.parents[row, node])) == (token, parent)
        assert_tree(tree, row, wanted)
    assert tree.num_nodes == 1 + len(paths)


def test_the_shape_of_a_budget():
    assert Counter(map(len, EAGLE_TREE)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    assert [len(level.ranks) for level in static_levels(EAGLE_TREE)] == [4, 8, 8, 3, 2]
    budget = Budget(paths=EAGLE_TREE)
    assert (budget.depth, budget.width, budget.is_chain, Budget(2).is_chain) == (5, 4, False, True)
    assert Budget(3, 2).shape() == ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0))
    assert Budget(paths=TREES["bush"]).shape() == TREES["bush"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depth": -1}, "needs depth from 0 to 1,024, found depth -1"),
        ({"width": 0}, "needs width from 1 to 256, found width 0"),
        ({"nodes": 0}, "needs nodes from 1 to 4,096, found nodes 0"),
        ({"paths": ()}, "list of 1 to 4,096 paths such as .* found 0 paths"),
        ({"paths": ((0,), (0,))}, "each of its paths once, found one twice"),
        ({"paths": ((0,), ())}, r"list of 1 to 1,024 ranks from 0 to 255, found \(\)"),
        ({"paths": ((0,), (1, 0))}, r"found \(1, 0\) without it: write \[\[0\], \[1\], \[0, 0\]\]"),
        ({"paths": ((0, 0), (0, 0, 0))}, r"found \(0, 0\)"),
        ({"paths": ((-1,),)}, r"found \(-1,\)"),
        ({"paths": ((0.5,),)}, r"found \(0.5,\)"),
    ],
)
def test_budgets_that_cannot_be_meant(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Budget(**wrong)


# --- children drawn from q -------------------------------------------------------------------------------------------


def q_of(distribution, request: Sampling, prompt, path) -> list[float]:
    scores = scores_of(distribution, request, prompt, path)
    if request.temperature == 0:
        return [float(token == scores.index(max(scores))) for token in range(len(scores))]
    return torch.tensor(scores, dtype=torch.float64).softmax(-1).tolist()


@pytest.mark.parametrize("kind", ["t1", "mixed", "penalties"])
@pytest.mark.parametrize("children", ["sampled", "distinct"])
@pytest.mark.parametrize(
    "budget", [{"depth": 3}, {"depth": 3, "width": 3}, {"paths": TREES["bush"]}], ids=["chain", "level", "bush"]
)
def test_drawn_children_come_with_the_q_they_were_drawn_from(budget, children, kind):
    distribution, budget = random_distribution(3), Budget(**budget, children=children)
    tree, _ = grow(distribution, budget, SAMPLINGS[kind])
    tree.check(VOCAB)
    for row, (prompt, request) in enumerate(zip(PROMPTS, SAMPLINGS[kind], strict=True)):
        paths, parents = paths_of(tree, row), tree.parents[row].tolist()
        for node, path in paths.items():
            below = [paths[other][-1] for other in paths if parents[other] == node]
            q = tree.draft_probs[row, node]
            if below:
                assert q.tolist() == pytest.approx(q_of(distribution, request, prompt, path), abs=1e-12)
                assert q[below].min() > 0
                assert children == "sampled" or len(set(below)) == len(below)
            elif request.temperature:
                assert not q.any()
            assert request.temperature or len(below) <= 1 or children == "sampled"
        if request.temperature:
            assert len(paths) == tree.num_nodes  # nothing is lost where every token has a chance


# 99.99% of a chi-square with so many degrees of freedom.
CRITICAL = {4: 23.5, 19: 49.9, 24: 58.0}


def chi_square(found: Counter, wanted: dict) -> float:
    total = sum(found.values())
    assert set(found) <= {key for key, p in wanted.items() if p > 0}
    return sum((found[key] - total * p) ** 2 / (total * p) for key, p in wanted.items() if p > 0)


@pytest.mark.parametrize("children", ["sampled", "distinct"])
def test_the_distribution_of_drawn_children(children):
    """Over many seeds: the first child is drawn from q; the second too, or from q without the first."""
    distribution, num, vocab = random_distribution(4, vocab=5, scale=0.7), 2000, 5
    requests = [Sampling(temperature=1.0, seed=seed) for seed in range(num)]
    prompts = [PROMPTS[0]] * num
    paths = ((0,), (1,), (0, 0), (1, 0))
    tree, _ = grow(distribution, Budget(paths=paths, children=children), requests, prompts, vocab=vocab)
    q = distribution(PROMPTS[0], ()).softmax(-1).tolist()
    first, second, under_first, under_second = tree.tokens[:, 1:].T.tolist()
    assert chi_square(Counter(first), dict(enumerate(q))) < CRITICAL[4]
    if children == "sampled":
        pairs = {(a, b): q[a] * q[b] for a in range(vocab) for b in range(vocab)}
    else:
        pairs = {(a, b): q[a] * q[b] / (1 - q[a]) for a in range(vocab) for b in range(vocab) if a != b}
    assert chi_square(Counter(zip(first, second, strict=True)), pairs) < CRITICAL[len(pairs) - 1]
    for above, below in ((first, under_first), (second, under_second)):
        for token in range(vocab):  # and each grandchild from the q of its own path
            found = Counter(b for a, b in zip(above, below, strict=True) if a == token)
            assert found.total() > 100
            assert (
                chi_square(found, dict(enumerate(distribution(PROMPTS[0], (token,)).softmax(-1).tolist())))
                < CRITICAL[4]
            )
    # Equal paths are not drawn with equal noise.
    cousins = Counter(x == y for a, b, x, y in zip(first, second, under_first, under_second, strict=True) if a == b)
    assert children == "distinct" or cousins[False] > cousins.total() / 2


# --- chains, slots, batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["keyed", "top"])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_chain_takes_the_best_child(kind, how):
    distribution = random_distribution(5)
    tree, growth = grow(distribution, Budget(4, children=how), SAMPLINGS[kind])
    assert tree.is_line
    assert growth.is_chain
    for row, (prompt, request) in enumerate(zip(PROMPTS, SAMPLINGS[kind], strict=True)):
        path = ()
        for _ in range(4):
            path = (*path, slow_children(distribution, request, prompt, path, how)[0][0])
        assert tree.tokens[row].tolist() == [prompt[-1], *path]


BUDGETS = {
    "chain": {"depth": 4},
    "level": {"depth": 3, "width": 3},
    "dynamic": {"depth": 4, "width": 4, "nodes": 9},
    "wide": {"depth": 2, "width": 20, "nodes": 30},
    "eagle": {"paths": EAGLE_TREE},
    "bush": {"paths": TREES["bush"]},
}


@pytest.mark.parametrize("children", ["keyed", "distinct"])
@pytest.mark.parametrize("name", BUDGETS)
def test_where_a_path_stands_among_the_drafters_own_slots(name, children):
    distribution, requests = random_distribution(6), SAMPLINGS["mixed"]
    tree, growth = grow(distribution, Budget(**BUDGETS[name], children=children), requests)
    drafted = growth.expanded()
    longest = 1 + int(tree.depths.max())
    for row in range(len(PROMPTS)):
        own = {path: node for node, path in paths_of(drafted, row).items()}
        paths = paths_of(tree, row)
        for path in paths.values():
            nodes = [node for node, other in paths.items() if other == path[: len(other)]]
            nodes.sort(key=lambda node, paths=paths: len(paths[node]))
            asked = torch.full((len(PROMPTS), longest), PAD)
            asked[row, : len(nodes)] = torch.tensor(nodes)
            wanted = [own.get(paths[node], PAD) for node in nodes] + [PAD] * (longest - len(nodes))
            assert growth.finish().slots_of(asked)[row].tolist() == wanted


@pytest.mark.parametrize("children", ["keyed", "top", "sampled", "distinct"])
@pytest.mark.parametrize("name", BUDGETS)
def test_a_row_grows_as_it_would_alone(name, children):
    """Beside rows of other lengths and samplings, and beside one that is not drafted for."""
    distribution, requests, budget = (
        random_distribution(7),
        SAMPLINGS["mixed"],
        Budget(**BUDGETS[name], children=children),
    )
    together, _ = grow(distribution, budget, requests, wanted=[True, False, True])
    for row in (0, 2):
        alone, _ = grow(distribution, budget, [requests[row]], [PROMPTS[row]])
        for key in ("tokens", "parents", "confidence", "draft_probs"):
            one, other = getattr(together, key), getattr(alone, key)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one[row], other[0]), key
    assert together.tokens[1].tolist() == [PROMPTS[1][-1], *[PAD] * (together.num_nodes - 1)]


@pytest.mark.parametrize("children", ["keyed", "top", "sampled", "distinct"])
@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("vocab", [2, 11])
def test_whatever_the_net_says_it_is_a_tree(vocab, name, children):
    """Vocabularies smaller than the tree is wide, tokens without a chance, sure ones, rows not drafted for."""
    budget = Budget(**BUDGETS[name], children=children)
    prompts = [tuple(token % vocab for token in prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    for seed, scale in enumerate((0.5, 3.0, 80.0)):
        requests = [
            Sampling(),
            Sampling(temperature=1.0, seed=seed),
            Sampling(temperature=0.7, top_k=2, seed=seed),
            Sampling(temperature=1.0, top_p=0.5, banned_tokens=(1,), seed=seed),
        ]
        wanted = [bool((seed + 1) >> row & 1 or row == 3) for row in range(4)]
        tree, _ = grow(random_distribution(seed, vocab, scale), budget, requests, prompts, wanted, vocab)
        tree.check(vocab)
        assert (tree.parents[~tree.valid] == -1).all()
        for row, drafts in enumerate(wanted):
            assert (tree.valid[row].sum() > 1) == drafts
            assert 1 not in tree.tokens[3, 1:]
        shape = budget.paths or (budget.width > 1 and children in ("sampled", "distinct") and budget.shape())
        most = len(shape) if shape else budget.nodes or budget.depth * budget.width
        assert tree.num_nodes <= 1 + most
        if tree.confidence is not None:
            chances = tree.confidence[tree.valid]
            assert ((chances >= 0) & (chances <= 1)).all()
            above = tree.confidence.gather(1, tree.parents.clamp(min=0))
            assert (tree.confidence <= above)[tree.valid].all()


def test_nothing_follows_a_token_that_could_not_be_drawn():
    """A chain ends where the draft network's logits are NaN, even if later ones are finite."""
    sampling = SamplingBatch([Sampling(temperature=1.0, seed=1)], KeyedNoise(8))
    builder = TreeBuilder(torch.tensor([5]), [True], [1], sampling, Budget(3, children="sampled"))
    for logits in (0.0, float("nan"), 0.0):
        builder.extend(torch.full((1, 1, 8), logits))
    tree = builder.finish().tree
    tree.check(8)
    assert tree.valid.tolist() == [[True, True, False, False]]
