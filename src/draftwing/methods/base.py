"""The base class of drafters, and the budget of a draft.

Shape suffixes: B rows, N nodes, T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from types import NoneType
from typing import Any

from torch import Tensor

from draftwing.checks import Argument, listed
from draftwing.errors import ConfigError, shown
from draftwing.models.context import NO_FEATURES, Context, FeatureSpec, Row, TargetOutput
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree, GrowthRule

# Limits of a budget: far beyond what pays off, and within any machine's memory.
MAX_DEPTH, MAX_WIDTH, MAX_NODES = 1024, 256, 4096
_CHILDREN = ("keyed", "top", "sampled", "distinct")


@dataclass(frozen=True)
class Budget:
    """How much to draft in one step, and the shape of the tree.

    Attributes:
        depth: tokens on the longest path, excluding the root.
        width: nodes expanded on each level, and children of each; 1 is a chain. For lookup: paths.
        nodes: nodes to verify besides the root: the best of all drafted nodes (EAGLE-2's re-ranking); None keeps the
            ``width`` best of each level.
        paths: a static tree instead: every node as the ranks of the children on its path, such as
            ``((0,), (1,), (0, 0))``. ``depth`` and ``width`` then follow from it. ``EAGLE_TREE`` is EAGLE-1's.
        children: how children are chosen, from the rule: ``keyed``, ``top``, ``sampled`` or ``distinct``.
        rule: the value and cost of nodes, which decide how much of depth, width and nodes is used; None uses all. Must
            be None if children are drawn from q.

    Raises:
        ConfigError: not a number or outside its range (at most 1,024 levels, 256 nodes per level and 4,096 nodes), or
            paths that are not a tree.
    """

    depth: int = 5
    width: int = 1
    nodes: int | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    children: str = "keyed"
    rule: GrowthRule | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.rule is not None and not isinstance(self.rule, GrowthRule):
            raise ConfigError(f"a budget's rule must be a GrowthRule or None, found {shown(self.rule)}")
        if not isinstance(self.children, str) or self.children not in _CHILDREN:
            raise ConfigError(f"children must be one of {', '.join(_CHILDREN)}, found {shown(self.children)}")
        if self.paths is not None:
            if self.nodes is not None:
                raise ConfigError("a static tree has the nodes of its paths: give either paths or nodes")
            paths = _checked_paths(self.paths)
            self._set("paths", paths)
            self._set("depth", max(map(len, paths)))
            self._set("width", 1 + max(max(path) for path in paths))
            return
        for name, least, most in (("depth", 0, MAX_DEPTH), ("width", 1, MAX_WIDTH), ("nodes", 1, MAX_NODES)):
            value = getattr(self, name)
            if value is None and name == "nodes":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ConfigError(f"a budget's {name} must be an integer, found {shown(value)}")
            if not least <= int(value) <= most:
                raise ConfigError(
                    f"a budget needs {name} from {least} to {most:,}, found {name} {shown(value)} (depth 0 drafts none)"
                )
            self._set(name, int(value))
        if self.depth * self.width > MAX_NODES:
            raise ConfigError(
                f"a budget may draft {MAX_NODES:,} nodes, depth times width, found {self.depth} times {self.width}: "
                f"make one of them smaller"
            )

    def _set(self, name: str, value: object) -> None:
        """Set a field of this frozen dataclass to its checked value."""
        object.__setattr__(self, name, value)

    def __str__(self) -> str:
        if self.paths is not None:
            return f"static of {len(self.paths)} nodes"
        if self.width == 1:
            return f"chain:{self.depth}"
        return f"dynamic:{self.nodes or 'all'},{self.depth},{self.width}"

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Return the budget of ``chain:DEPTH`` or ``dynamic:NODES,DEPTH,WIDTH``. Raises ValueError for other texts."""
        kind, _, numbers = text.partition(":")
        if kind == "chain":
            return cls(int(numbers))
        if kind == "dynamic" and numbers.count(",") == 2:
            nodes, depth, width = map(int, numbers.split(","))
            return cls(depth, width, nodes)
        raise ValueError("neither chain:DEPTH nor dynamic:NODES,DEPTH,WIDTH")

    @property
    def is_chain(self) -> bool:
        """True if no node has more than one child."""
        return self.width == 1

    @property
    def max_nodes(self) -> int:
        """The most nodes of a tree, besides the root."""
        return len(self.paths) if self.paths else self.nodes or self.depth * self.width

    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the static tree: ``paths``, or ``width`` children of the root that continue as chains."""
        if self.paths is not None:
            return self.paths
        return tuple((first, *[0] * rest) for rest in range(self.depth) for first in range(self.width))


def cut_to_nodes(budget: Budget, max_nodes: int) -> Budget:
    """Return ``budget`` with at most ``max_nodes`` nodes."""
    if max_nodes == 0:
        return Budget(0, children=budget.children)
    if budget.paths is not None:  # keep the shallow paths, parents first
        paths = sorted(budget.paths, key=lambda path: (len(path), path))[:max_nodes]
        return replace(budget, paths=tuple(paths)) if len(paths) < len(budget.paths) else budget
    depth, width = min(budget.depth, max_nodes), min(budget.width, max_nodes)
    if width == 1:
        return budget if depth == budget.depth else replace(budget, depth=depth, width=1, nodes=None)
    return replace(budget, depth=depth, width=width, nodes=min(budget.nodes or max_nodes, max_nodes))


def _checked_paths(given: object) -> tuple[tuple[int, ...], ...]:
    """Return the paths of a static tree as tuples; lists, as in JSON, are accepted too."""

    def is_rank(value: object) -> bool:
        return not isinstance(value, bool) and isinstance(value, Integral) and 0 <= int(value) < MAX_WIDTH

    listed_paths = listed(given, MAX_NODES) if isinstance(given, list | tuple) else None
    if not listed_paths:
        count = f"{len(given):,} paths" if isinstance(given, list | tuple) else shown(given)
        raise ConfigError(
            f"a static tree is a list of 1 to {MAX_NODES:,} paths such as [[0], [1], [0, 0]], found {count}"
        )
    listed_ranks = []
    for path in listed_paths:
        ranks = listed(path, MAX_DEPTH) if isinstance(path, list | tuple) else None
        if not ranks or not all(map(is_rank, ranks)):
            raise ConfigError(
                f"a path of a static tree is a list of 1 to {MAX_DEPTH:,} ranks from 0 to {MAX_WIDTH - 1}, found "
                f"{shown(path)}: write [0, 2] for the third child of the root's first child"
            )
        listed_ranks.append(tuple(map(int, ranks)))
    paths = tuple(listed_ranks)
    prefixes = {(), *paths}
    orphan = next((path for path in paths if path[:-1] not in prefixes), None)
    if orphan is not None:
        raise ConfigError(
            f"a static tree has each path's parent in its list too, found {shown(orphan)} without it: write "
            f"[[0], [1], [0, 0]] for two children of the root and one grandchild"
        )
    if len(prefixes) != len(paths) + 1:
        raise ConfigError("a static tree has each of its paths once, found one twice: leave it out")
    return paths


# EAGLE-1's tree (2401.15077): 4, 8, 8, 3 and 2 nodes on its five levels.
EAGLE_TREE: tuple[tuple[int, ...], ...] = (
    *((rank,) for rank in range(4)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
# Medusa's tree (2401.10774) for its first heads on Vicuna 7B: 63 nodes, 10, 28, 23 and 2 on its four levels.
MEDUSA_TREE: tuple[tuple[int, ...], ...] = (
    *((first,) for first in range(10)),
    *((first, rank) for first, most in enumerate((10, 7, 3, 2, 1, 1, 1, 1, 1, 1)) for rank in range(most)),
    *((0, second, rank) for second, most in enumerate((10, 3, 2, 1, 1, 1, 1, 1)) for rank in range(most)),
    *((1, 0, 0), (1, 0, 1), (2, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1)),
)
STATIC_TREES = {"static": EAGLE_TREE, "medusa": MEDUSA_TREE}  # by their names on the command line


def swap_remove(rows: list[Any], row: int) -> None:
    """Drop a row of a drafter's state; the last row takes its place (see ``Drafter.remove``)."""
    rows[row] = rows[-1]
    rows.pop()


@dataclass
class ListTree:
    """A row's draft tree as lists.

    Attributes:
        tokens, parents: the nodes, the root first; parents come before their children.
        node_probs: probability of each node given its parent.
        depth: of the deepest node.
        score: the expected number of accepted nodes: the sum of the probabilities of all paths from the root.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    node_probs: list[float] = field(default_factory=lambda: [1.0])
    depth: int = 0
    score: float = 0.0


BUDGET_ARGUMENT = Argument((Budget, NoneType), "a Budget or None", "write Budget(5) for chains of 5")


class Drafter:
    """Base class of every drafter: proposes a tree per row. It keeps a state per row, in the order of ``ctx.rows``.

    A subclass overrides ``propose`` and what else it needs.

    Attributes:
        name: for reports.
        features: the target's hidden states that it reads.
        drafts: False if it never proposes anything.
        costs_forwards: a draft takes forwards of a network, which are measured and weighed against their gain.
        grows_by_rule: it follows ``Budget.rule`` itself; the decode loop prunes the trees of other drafters by it.
        learns: its drafts depend on earlier requests (see ``learn`` and ``forget``).
        resumes: it has slots or reads features, and its rows may begin with slots that are already written: ``admit``
            then starts at ``Row.resumed``, with the features from there (see ``read_on`` and ``num_read``).
        lists: its trees start as lists (see ``list_trees``).
        has_probs: it can draw children from a q over the target's vocabulary, which the classic rules need.
        identity: besides ``name``, tells apart what caches must not mix up: two heads of one name.
        num_bytes: weights that one forward of its network reads, including the LM head.
        runs_as: what computes its matrices, such as ``CPU kernel, int8``; empty without a network.
        tokenizer: how drafts of a model with another tokenizer become the target's tokens; empty if there is none.
        is_one_request: its ``propose`` is one request to a runner (``NetDrafter``), so that the target may verify the
            trees in the same call.
        context: tokens beyond which a draft does not become slower; 0 if its time hardly depends on the context.
        part_names: the drafters it combines, among which a request may choose.
    """

    name: str = ""
    features: FeatureSpec = NO_FEATURES
    drafts: bool = True
    costs_forwards: bool = True
    grows_by_rule: bool = False
    learns: bool = False
    resumes: bool = False
    lists: bool = False
    has_probs: bool = True
    identity: str = ""
    num_bytes: int = 0
    runs_as: str = ""
    tokenizer: str = ""
    is_one_request: bool = False
    context: int = 0
    part_names: tuple[str, ...] = ()

    @property
    def reads_features(self) -> bool:
        """True if it needs the target's hidden states."""
        return bool(self.features.taps)

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Add the last row of ``ctx.rows``; ``features`` (1, T - 1, F) of its prompt."""

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Return a tree per row whose roots are the pending tokens, without looking beyond what the target emitted.

        ``DraftTree.node_probs`` may hold the probability of each node given its parent; the budget learns from
        acceptance how far it is off, and drafts accordingly.
        """
        return ctx.roots()

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Take the outcome of a step; ``ctx.rows`` still shows the state before it.

        Other drafters may have proposed nodes too (``methods.ensemble``): ``accepted.path`` are nodes of ``tree``, as
        in ``output``, and ``accepted.own_path`` those that this drafter proposed, in its own numbering.
        """

    def remove(self, ctx: Context, row: int) -> None:
        """Drop a row; the last row takes its place. Called before ``ctx.rows`` changes."""

    def learn(self) -> None:
        """Learn from the steps since the last call; called between steps of an ``Engine``, and may take some time."""

    def forget(self) -> None:
        """Drop everything remembered from earlier requests, shared with other drafters of the same model."""

    @property
    def num_read(self) -> list[int]:
        """Number of leading slots of each row whose content is final."""
        raise NotImplementedError

    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        """Read part of a prompt, the slots from ``row.resumed`` to before ``stop``; ``admit`` follows.

        Args:
            row: will be admitted after the rows of ``ctx``.
            features: (1, stop - resumed, F) of the part; None if it reads none.
        """
        raise NotImplementedError

    def list_trees(self, ctx: Context, budget: Budget) -> Sequence[ListTree]:
        """Return the trees of ``propose`` as lists: the same nodes in the same order.

        Such a drafter has no network, learns from the rows' tokens alone, and gets no ``Accepted.own_path``.
        """
        raise NotImplementedError

    def copy_capabilities(self, drafter: Drafter) -> None:
        """Take the attributes that describe ``drafter``, which this one wraps; its name and identity are kept."""
        names = (
            "features drafts costs_forwards grows_by_rule learns resumes lists has_probs num_bytes runs_as tokenizer "
            "context part_names"
        )
        for name in names.split():
            setattr(self, name, getattr(drafter, name))


class NoDrafter(Drafter):
    """Drafts nothing: autoregressive decoding, the baseline of every speedup."""

    name = "none"
    drafts = False
    costs_forwards = False


def no_probs(name: str) -> str:
    """Return the message of an error: a classic rule was chosen for such a drafter."""
    return (
        f"{name} drafts text that the target's tokenizer encodes, so there is no q of the target's tokens: use "
        f"rule='match' or 'match-top', or a draft model with the target's tokenizer"
    )


def check_drafter(drafter: object) -> None:
    """Raise ConfigError if a function that makes drafters has returned something else."""
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"a function that makes drafters must return a Drafter, found {shown(drafter)}")
