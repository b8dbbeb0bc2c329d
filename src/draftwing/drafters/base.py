"""What a drafter is: it watches a context and proposes a tree for every row.

Shape suffixes: B rows, N nodes, T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from draftwing.errors import ConfigError, shown
from draftwing.model.target import NO_FEATURES, Context, FeatureSpec, Row, TargetOutput
from draftwing.run.request import GrowthRule
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

if TYPE_CHECKING:
    from draftwing.drafters.retrieval.following import Grown

__all__ = [
    "EAGLE_TREE",
    "MEDUSA_TREE",
    "STATIC_TREES",
    "Budget",
    "Drafter",
    "Learning",
    "Listing",
    "NoDrafter",
    "Resuming",
    "Traits",
]

# What a budget may ask for, so that no shape asks for more memory or time than a machine has.
MAX_DEPTH, MAX_WIDTH, MAX_NODES = 1024, 256, 4096
_CHILDREN = ("keyed", "top", "sampled", "distinct")


@dataclass(frozen=True)
class Traits:
    """What a drafter is like, for whoever plans, measures and runs it.

    Attributes:
        drafts: whether it ever proposes anything.
        reads_features: whether it needs the target's hidden states.
        costs_forwards: whether a draft takes passes of a net, which are then measured and weighed.
        grows_by_rule: whether it follows ``Budget.rule`` itself; the loop cuts the trees of others by it.
        identity: tells apart, beside ``Drafter.name``, what caches must not mix up: two heads of one name.
        num_bytes: of weights that one pass of its net reads, the LM head's too.
        runs_as: what computes its matrices, such as ``CPU kernel, int8``; empty without a net.
        forget: drops what drafters of its maker have kept of former requests; None where they keep nothing. Whoever
            measures the same prompts again calls it in between (``LM.forget``).
        learns: whether it is a ``Learning`` one.
        resumes: whether it is a ``Resuming`` one.
        lists: whether it is a ``Listing`` one.
        hands_on: whether its trees are those that its runner drafts, as they come, so that the call that drafts
            them may verify them too (``Context.walk``).
        scores: whether it has nodes scored for its own use beside all that it proposes (``DraftTree.num_scored``).
        context: tokens of text with which a draft takes what it takes with any longer one; 0: it depends little.
        parts: names of the drafters that it consists of, where there are several: a request may choose among them.
    """

    drafts: bool = True
    reads_features: bool = False
    costs_forwards: bool = True
    grows_by_rule: bool = False
    identity: str = ""
    num_bytes: int = 0
    runs_as: str = ""
    forget: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    learns: bool = False
    context: int = 0
    parts: tuple[str, ...] = ()
    resumes: bool = False
    lists: bool = False
    scores: bool = False
    hands_on: bool = False


@dataclass(frozen=True)
class Budget:
    """How much to draft in one step, and in what shape.

    Attributes:
        depth: tokens on the longest path, the root not counted.
        width: nodes expanded on each level, and children of each; 1 is a chain. For lookup: paths.
        nodes: nodes to verify beside the root: the best of all that the drafter met (EAGLE-2's re-ranking); None
            keeps the ``width`` best of each level.
        paths: a static tree instead: every node as the ranks of the children on its path, such as
            ``((0,), (1,), (0, 0))``. ``depth`` and ``width`` then follow from it. ``EAGLE_TREE`` is EAGLE-1's.
        children: how children are chosen, from the rule: ``keyed``, ``top``, ``sampled`` or ``distinct``.
        rule: what nodes are worth, which decides how much of depth, width and nodes is used; None uses all. With
            children drawn from q there must be none.

    Raises:
        ConfigError: not a number or outside its range, or paths that are not a tree. At most 1,024 levels, 256
            nodes a level and 4,096 nodes may be asked for: far beyond what pays, and within any machine's memory.
    """

    depth: int = 5
    width: int = 1
    nodes: int | None = None
    paths: tuple[tuple[int, ...], ...] | None = None
    children: str = "keyed"
    rule: GrowthRule | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
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
        """Put a checked value in place of the given one."""
        object.__setattr__(self, name, value)

    def __str__(self) -> str:
        if self.paths is not None:
            return f"static of {len(self.paths)} nodes"
        if self.width == 1:
            return f"chain:{self.depth}"
        return f"dynamic:{self.nodes or 'all'},{self.depth},{self.width}"

    @property
    def is_chain(self) -> bool:
        """Whether no node has more than one child."""
        return self.width == 1

    def shape(self) -> tuple[tuple[int, ...], ...]:
        """The static tree: ``paths``, or ``width`` children of the root that go on as chains."""
        if self.paths is not None:
            return self.paths
        return tuple((first, *[0] * rest) for rest in range(self.depth) for first in range(self.width))


def _checked_paths(given: object) -> tuple[tuple[int, ...], ...]:
    """The paths of a static tree as tuples; lists are taken too, as JSON has them."""
    if not isinstance(given, list | tuple) or not 0 < len(given) <= MAX_NODES:
        found = f"{len(given):,} paths" if isinstance(given, list | tuple) else shown(given)
        raise ConfigError(
            f"a static tree is a list of 1 to {MAX_NODES:,} paths such as [[0], [1], [0, 0]], found {found}"
        )
    for path in given:
        if not isinstance(path, list | tuple) or not 0 < len(path) <= MAX_DEPTH or not all(map(_is_rank, path)):
            raise ConfigError(
                f"a path of a static tree is a list of 1 to {MAX_DEPTH:,} ranks from 0 to {MAX_WIDTH - 1}, found "
                f"{shown(path)}: write [0, 2] for the third child of the root's first child"
            )
    paths = tuple(tuple(map(int, path)) for path in given)
    known = {(), *paths}
    for path in paths:
        if path[:-1] not in known:
            raise ConfigError(
                f"a static tree has each path's parent in its list too, found {shown(path)} without it: write "
                f"[[0], [1], [0, 0]] for two children of the root and one grandchild"
            )
    if len(known) != len(paths) + 1:
        raise ConfigError("a static tree has each of its paths once, found one twice: leave it out")
    return paths


def _is_rank(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and 0 <= int(value) < MAX_WIDTH


# EAGLE-1's tree (2401.15077): 4, 8, 8, 3 and 2 nodes on its five levels.
EAGLE_TREE: tuple[tuple[int, ...], ...] = (
    *((rank,) for rank in range(4)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


# Medusa's (2401.10774), made for its first heads on Vicuna 7B: 63 nodes, 10, 28, 23 and 2 on its four levels.
MEDUSA_TREE: tuple[tuple[int, ...], ...] = (
    *((first,) for first in range(10)),
    *((first, rank) for first, most in enumerate((10, 7, 3, 2, 1, 1, 1, 1, 1, 1)) for rank in range(most)),
    *((0, second, rank) for second, most in enumerate((10, 3, 2, 1, 1, 1, 1, 1)) for rank in range(most)),
    *((1, 0, 0), (1, 0, 1), (2, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1)),
)
STATIC_TREES = {"static": EAGLE_TREE, "medusa": MEDUSA_TREE}  # by the names that the command line gives them


class Drafter(Protocol):
    """Proposes trees. It keeps a state per row, in the order of ``ctx.rows``.

    Attributes:
        name: for reports.
        features: the target's hidden states that it reads.
        traits: what it is like.
    """

    name: str
    features: FeatureSpec
    traits: Traits

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """A row was added at the end of ``ctx.rows``; ``features`` (1, T - 1, F) of its prompt."""
        ...

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """A tree per row whose roots are the pending tokens. May look at nothing that the target has not emitted.

        ``DraftTree.told`` may say how likely each node is, given its parent; what is learnt of it decides how much is
        drafted and verified (``budget.planner``).
        """
        ...

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """What became of the tree. ``ctx.rows`` still shows the state before the step.

        Others may have proposed nodes of it too (``drafters.several``): ``accepted.path`` are nodes of ``tree``, as
        ``output`` has them, and ``accepted.own_path`` those that this drafter proposed, in its own numbers.
        """
        ...

    def remove(self, ctx: Context, row: int) -> None:
        """A row left; the last row takes its place. Called before ``ctx.rows`` changes."""
        ...


class Learning(Drafter, Protocol):
    """A drafter that changes with what it sees, between two steps of an ``Engine``."""

    def learn(self) -> None:
        """Learn from the steps since the last call; may take a share of their time."""
        ...


class Resuming(Drafter, Protocol):
    """A drafter that reads features or has slots, and whose rows may begin with slots that are written already.

    Its ``admit`` takes up a row at ``Row.resumed``, with the features from there on.
    """

    @property
    def num_read(self) -> list[int]:
        """Of each row, how many slots from the first one on hold what they will hold for good."""
        ...

    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        """Read a piece of a prompt, the slots from ``row.resumed`` to before ``stop``; ``admit`` will follow.

        Args:
            row: one that is to come behind those of ``ctx``.
            features: (1, stop - resumed, F) of the piece; None where it reads none.
        """
        ...


class Listing(Drafter, Protocol):
    """A drafter without a net, whose trees are lists before they are tensors: who merges them needs no more.

    It learns from the rows' tokens alone, and never hears which of its own nodes were kept (``Accepted.own``).
    """

    def grown(self, ctx: Context, budget: Budget) -> Sequence[Grown]:
        """What ``propose`` proposes, of each row: the same nodes in the same order."""
        ...


class NoDrafter:
    """Drafts nothing: ordinary decoding, the baseline of every speedup."""

    name = "none"
    features = NO_FEATURES
    traits = Traits(drafts=False, costs_forwards=False)

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Nothing to keep."""

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Lone roots."""
        return ctx.roots()

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Nothing to learn."""

    def remove(self, ctx: Context, row: int) -> None:
        """Nothing to drop."""
