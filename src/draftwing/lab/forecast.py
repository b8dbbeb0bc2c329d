"""What a head would have proposed at every position of a few held-out texts: the statistics that forecasts are made of.

At each position of a text that the target wrote, the drafter grew one large *reference tree*. Of it is kept what
decides whether another tree would have held the text's own next tokens: which child of its parent each of them was, and
how many nodes of each level were likelier. So tau of any chain, static or dynamic tree follows by walking along the
texts as decoding does (``replay``). Positions after a rejection are harder than others, and hard ones come in runs; a
walk sees both, where a table of rates would not.

One file of some tens of kilobytes lies in the head's folder; no model is needed to read it.

Shape suffixes: T texts, P positions of all texts one after another, E nodes of the texts' own paths, L levels,
K thresholds.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from draftwing.budget.costs import Costs
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import CheckpointError, ConfigError
from draftwing.formats.identity import head_id
from draftwing.formats.write import write_fix
from draftwing.lab.compare import compare
from draftwing.lm import LM
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import Context, TargetOutput
from draftwing.models.target import Target
from draftwing.request import Request
from draftwing.runtime.tree_builder import static_levels
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.text.prompts import Prompt
from draftwing.tree import PAD, Accepted, DraftTree

FILE = "held_out.npz"  # in a head's folder
FORMAT = 1
DEPTH, WIDTH = 10, 10  # of the reference tree
REFERENCE = Budget(DEPTH, WIDTH, nodes=WIDTH + (DEPTH - 1) * WIDTH * WIDTH)  # every node that it meets
# The chance of a path from which nodes are counted: what a tree that grows by its nodes' worth is made of.
THRESHOLDS = (0.6, 0.4, 0.25, 0.16, 0.1, 0.06, 0.04, 0.025)
PER_OCTAVE, MOST = 8, 255  # of a chance as one byte
_MOST_BYTES = 64 * 2**20  # of a file: far beyond what any collection writes


def quantised(chance: np.ndarray) -> np.ndarray:
    """Chances as bytes: 0 is certain, ``PER_OCTAVE`` more is half as likely."""
    with np.errstate(divide="ignore"):
        found: np.ndarray = np.clip(np.round(-PER_OCTAVE * np.log2(chance)), 0, MOST).astype(np.uint8)
    return found


@dataclass(frozen=True)
class Texts:
    """The texts of one temperature. All counts stop at 255.

    Attributes:
        lengths: (T,) int32: positions of each text.
        stopped: (T,) bool: whether the text ended there by itself, so that no step emits more.
        found: (P,) uint8: how many of a position's next tokens the reference tree holds as one path.
        ranks: (E,) uint8: which child of its parent each node of these paths is.
        chances: (E,) uint8: of the path down to it, as told, ``quantised``.
        likelier: (E, L) uint8: nodes of each level that are likelier than it, or as likely and met before it.
        sizes: (P, K) uint8: nodes whose path's chance is above each of ``THRESHOLDS``.
        levels: (P, K) uint8: the deepest level of those.
    """

    lengths: np.ndarray
    stopped: np.ndarray
    found: np.ndarray
    ranks: np.ndarray
    chances: np.ndarray
    likelier: np.ndarray
    sizes: np.ndarray
    levels: np.ndarray

    def __post_init__(self) -> None:
        texts, positions, entries = len(self.lengths), len(self.found), len(self.ranks)
        shapes = {
            "lengths": (texts,),
            "stopped": (texts,),
            "found": (positions,),
            "ranks": (entries,),
            "chances": (entries,),
            "likelier": (entries, DEPTH),
            "sizes": (positions, len(THRESHOLDS)),
            "levels": (positions, len(THRESHOLDS)),
        }
        for name, shape in shapes.items():
            value = getattr(self, name)
            kind = {"lengths": np.int32, "stopped": np.bool_}.get(name, np.uint8)
            if value.shape != shape or value.dtype != kind:
                raise ConfigError(
                    f"held-out statistics: `{name}` must be {np.dtype(kind).name} of shape {shape}, found "
                    f"{value.dtype.name} of {value.shape}: collect them anew"
                )
        if not texts or (self.lengths < 1).any() or int(self.lengths.sum()) != positions:
            raise ConfigError(
                f"held-out statistics: the texts' lengths must be at least 1 and add up to {positions} positions, "
                f"found {texts} texts of {int(self.lengths.sum())}: collect them anew"
            )
        if self.found.max() > DEPTH or int(self.found.sum(dtype=np.int64)) != entries:
            raise ConfigError(
                f"held-out statistics: the paths must be at most {DEPTH} deep and add up to {entries} nodes: collect "
                f"them anew"
            )


@dataclass(frozen=True)
class HeldOut:
    """The statistics of a head.

    Attributes:
        head: ``head_id`` of the head that they were made with.
        target: its name; ``runs_as`` is what computed the head's matrices.
        context: tokens of a row in the mean.
        texts: by temperature.
    """

    head: str
    target: str
    runs_as: str
    context: float
    texts: Mapping[float, Texts]

    def of(self, temperature: float) -> Texts:
        """The texts of a temperature.

        Raises:
            ConfigError: there are none of it.
        """
        found = self.texts.get(float(temperature))
        if found is None:
            known = ", ".join(f"{each:g}" for each in sorted(self.texts))
            raise ConfigError(
                f"the head's held-out statistics are of temperature {known}, not of {temperature:g}: forecast those, "
                f"or collect others with `draftwing predict --collect -T {temperature:g}`"
            )
        return found

    def joined(self, older: HeldOut) -> HeldOut:
        """With what ``older`` has of other temperatures, where both were made in the same way."""
        if any(getattr(self, name) != getattr(older, name) for name in ("head", "target", "runs_as")):
            return self
        return replace(self, texts={**older.texts, **self.texts})

    def describe(self) -> dict[str, Any]:
        """What they were made of, as plain JSON values."""
        return {
            "head": self.head,
            "target": self.target,
            "runs_as": self.runs_as,
            "context": self.context,
            "texts": {f"{each:g}": len(self.texts[each].lengths) for each in sorted(self.texts)},
            "positions": {f"{each:g}": len(self.texts[each].found) for each in sorted(self.texts)},
        }

    # --- the file --------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> Path:
        """Put them into a head's folder, whole or not at all; the file's path.

        Raises:
            CheckpointError: it cannot be written.
        """
        file = Path(folder) / FILE
        about: dict[str, Any] = {"format": FORMAT, "depth": DEPTH, "width": WIDTH, "thresholds": THRESHOLDS}
        about |= {name: getattr(self, name) for name in ("head", "target", "runs_as", "context")}
        about |= {"texts": list(self.texts)}
        arrays = {"about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}
        for number, texts in enumerate(self.texts.values()):
            arrays |= {f"{each.name}_{number}": getattr(texts, each.name) for each in fields(Texts)}
        partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as stream:
                np.savez_compressed(stream, allow_pickle=False, **arrays)
            os.replace(partial, file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise CheckpointError(
                f"{file}: the held-out statistics cannot be written ({error}): {write_fix(error)}"
            ) from error
        return file

    @classmethod
    def read(cls, folder: Path) -> HeldOut:
        """Those of a head's folder.

        Raises:
            CheckpointError: there are none, they cannot be read, or they were made with other weights.
        """
        file = Path(folder) / FILE
        collect = f"collect them with `draftwing predict --collect --draft {folder}` and the head's target and prompts"
        if not file.exists():
            raise CheckpointError(
                f"{folder}: has no held-out statistics ({FILE}), which a forecast is made of: {collect}"
            )
        try:
            if file.stat().st_size > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
            found = cls._parsed(file.read_bytes())
        except (EOFError, OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{file}: not readable as held-out statistics ({error}): {collect}") from error
        if found.head != head_id(Path(folder)):
            raise CheckpointError(
                f"{file}: these held-out statistics were made with other weights than the head has now: {collect}"
            )
        return found

    @classmethod
    def _parsed(cls, data: bytes) -> HeldOut:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes().decode())
            same = {"format": FORMAT, "depth": DEPTH, "width": WIDTH, "thresholds": list(THRESHOLDS)}
            if not isinstance(about, dict) or {name: about.get(name) for name in same} != same:
                raise ValueError("they are of another version")
            texts = {
                float(temperature): Texts(**{each.name: arrays[f"{each.name}_{number}"] for each in fields(Texts)})
                for number, temperature in enumerate(about["texts"])
            }
        named = {name: str(about[name]) for name in ("head", "target", "runs_as")}
        return cls(**named, context=float(about["context"]), texts=texts)


# Tau of a tree from held-out statistics: a walk along each text, as decoding with that tree would take it.
#
#     chain     goes on while the text's own next token is the first child
#     static    while the ranks of the path are among those of the tree
#     dynamic   while the node was among the ``width`` best of its level (else it had no children), and is among the
#               ``nodes`` best of all
#     auto      a tree of the nodes whose path's chance is above a threshold: what one that grows by its nodes' worth
#               comes to, at a constant price of a node
#
# Dynamic trees of the reference tree's width are exact on the texts that were collected; so are chains and static
# trees,
# where no node of theirs on the text's path fell out of the reference tree. Of
# narrower dynamic trees, nodes that would not have been met count among the likelier ones, which makes tau a little too
# small.


BRANCHES = 4  # children of a node of a tree that grows by its nodes' worth (``budget.planner``)


@dataclass(frozen=True)
class Walk:
    """What decoding did.

    Attributes:
        tokens, steps: (T,) int64: emitted on each text, and target forwards.
        nodes, levels: in the mean of all steps: nodes verified beside the root, and levels drafted.
    """

    tokens: np.ndarray
    steps: np.ndarray
    nodes: float
    levels: float

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward."""
        return float(self.tokens.sum() / self.steps.sum())

    def interval(self, draws: int = 1000) -> tuple[float, float]:
        """Of tau, 95%: bootstrap over the texts, always the same."""
        generator = np.random.default_rng(0)
        chosen = generator.integers(len(self.steps), size=(draws, len(self.steps)))
        taus = self.tokens[chosen].sum(1) / self.steps[chosen].sum(1)
        low, high = np.quantile(taus, (0.025, 0.975))
        return float(low), float(high)


def check_reach(budget: Budget) -> None:
    """Raise ConfigError where a tree goes beyond what was collected."""
    if budget.depth > DEPTH or budget.width > WIDTH:
        raise ConfigError(
            f"{budget}: held-out statistics reach {DEPTH} levels of {WIDTH} nodes, and this tree has {budget.depth} of "
            f"{budget.width}: forecast a smaller one, or measure it with `draftwing compare --tree`"
        )


def walk(texts: Texts, budget: Budget) -> Walk:
    """With trees of one budget.

    Raises:
        ConfigError: see ``check_reach``.
    """
    check_reach(budget)
    met = budget.width + max(budget.depth - 1, 0) * budget.width**2
    nodes = len(budget.shape()) if budget.nodes is None else min(budget.nodes, met)
    _, tokens, steps = _visited(texts, accepted(texts, budget))
    return Walk(tokens, steps, float(nodes), float(budget.depth))


def walk_above(texts: Texts, place: int) -> Walk:
    """With trees of all nodes whose path's chance is above ``THRESHOLDS[place]``."""
    visited, tokens, steps = _visited(texts, accepted_above(texts, place))
    # Whether a level was worth drafting is only known of the nodes that it was drafted below.
    levels = np.minimum(texts.levels[visited, place].astype(np.float64) + 1, DEPTH)
    return Walk(tokens, steps, float(texts.sizes[visited, place].mean()), float(levels.mean()))


def accepted(texts: Texts, budget: Budget) -> np.ndarray:
    """(P,) how many drafted tokens each position's step would keep."""
    ranks, depths = texts.ranks, _depths(texts)
    if budget.is_chain and budget.paths is None:
        fits = ranks == 0
    elif budget.paths is not None or budget.nodes is None:
        return _accepted_static(texts, budget.shape()) if budget.paths else _accepted_beam(texts, budget)
    else:
        rivals = np.where(np.arange(DEPTH) < budget.depth, texts.likelier, 0).sum(1)
        fits = (rivals < budget.nodes) & _was_met(texts, budget.width)
    return _leading(texts, fits & (depths <= budget.depth))


def accepted_above(texts: Texts, place: int) -> np.ndarray:
    """(P,) the same of ``walk_above``."""
    certain = texts.chances < quantised(np.array([THRESHOLDS[place]]))[0]
    return _leading(texts, certain & _was_met(texts, BRANCHES))


def _accepted_beam(texts: Texts, budget: Budget) -> np.ndarray:
    """Of a dynamic tree that keeps the best nodes of each level, and no others."""
    return _leading(texts, (_places(texts) < budget.width) & (_depths(texts) <= budget.depth))


def _accepted_static(texts: Texts, paths: Iterable[tuple[int, ...]]) -> np.ndarray:
    known, found = set(paths), []
    ranks, at = texts.ranks.tolist(), 0
    for length in texts.found.tolist():
        path = tuple(ranks[at : at + length])
        at += length
        found.append(next((depth for depth in range(length) if path[: depth + 1] not in known), length))
    return np.array(found, dtype=np.int64)


def _was_met(texts: Texts, width: int) -> np.ndarray:
    """(E,) whether each would be met where ``width`` nodes of each level have as many children each."""
    first = _depths(texts) == 1
    above = np.concatenate([[0], _places(texts)[:-1]])  # a path's nodes stand one after another
    met: np.ndarray = (texts.ranks < width) & (first | (above < width))
    return met


def _depths(texts: Texts) -> np.ndarray:
    """(E,) of each node, from 1."""
    found = texts.found.astype(np.int64)
    starts = np.cumsum(found) - found
    return np.arange(len(texts.ranks)) - np.repeat(starts, found) + 1


def _places(texts: Texts) -> np.ndarray:
    """(E,) likelier nodes of the same level."""
    same: np.ndarray = texts.likelier[np.arange(len(texts.ranks)), _depths(texts) - 1]
    return same


def _leading(texts: Texts, fits: np.ndarray) -> np.ndarray:
    """(P,) how many of a position's path fit, up to the first one that does not."""
    held = np.zeros((len(texts.found), DEPTH), dtype=bool)
    held[np.repeat(np.arange(len(texts.found)), texts.found), _depths(texts) - 1] = fits
    kept: np.ndarray = np.logical_and.accumulate(held, axis=1).sum(1)
    return kept


def _visited(texts: Texts, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    visited: list[int] = []
    tokens, steps, start, counts = [], [], 0, kept.tolist()
    for length, stops in zip(texts.lengths.tolist(), texts.stopped.tolist(), strict=True):
        at, before = 0, len(visited)
        while at < length:
            visited.append(start + at)
            at += counts[start + at] + 1
        # Only an end of its own cuts a step short; a text that was left off goes on.
        tokens.append(length if stops else at)
        steps.append(len(visited) - before)
        start += length
    return np.array(visited), np.array(tokens), np.array(steps)


# Collects held-out statistics: the target writes texts, and the drafter shows at each position what it would draft.


TOKENS, MAX_BATCH = 128, 16


class _Watched(Drafter):
    """A drafter that grows the reference tree in every step, shows it, and proposes nothing of it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.name, self.identity = drafter, drafter.name, drafter.identity
        self.copy_capabilities(drafter)
        self.tree: DraftTree | None = None

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        self._drafter.admit(ctx, features)

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Lone roots: each token is decoded by itself."""
        self.tree = self._drafter.propose(ctx, sampling, REFERENCE)
        return ctx.roots()

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """The drafter goes on from the true features."""
        self._drafter.observe(ctx, tree, accepted, output)

    def remove(self, ctx: Context, row: int) -> None:
        """A row left."""
        self._drafter.remove(ctx, row)


@dataclass
class _Grown:
    """A reference tree: (N,) tokens, parents and the chance of each node's path; the root is node 0."""

    tokens: np.ndarray
    parents: np.ndarray
    chances: np.ndarray


@dataclass
class _Columns:
    """``Texts`` in the making."""

    lengths: list[int] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    likelier: list[np.ndarray] = field(default_factory=list)
    sizes: list[np.ndarray] = field(default_factory=list)
    levels: list[np.ndarray] = field(default_factory=list)

    def add(self, request: Request, trees: Sequence[_Grown], most: int) -> None:
        """A finished text, of which ``most`` positions count."""
        stops = request.finish_reason == "stop" and len(request.token_ids) <= most
        length = min(len(request.token_ids), most)  # what follows the last position was written too, but for an end
        self.lengths.append(length)
        self.stopped.append(stops)
        for position, tree in enumerate(trees[:length]):
            self._add_position(tree, request.token_ids[position : position + DEPTH])

    def _add_position(self, tree: _Grown, following: Sequence[int]) -> None:
        depths = _depths_collect(tree.parents)
        used = depths > 0
        node, depth, index = 0, 0, np.arange(len(depths))
        for token in following:
            children = np.flatnonzero((tree.parents == node) & used)
            (at,) = np.nonzero(tree.tokens[children] == token)
            if not len(at):
                break
            node, depth = int(children[at[0]]), depth + 1
            chance = tree.chances[node]
            above = used & ((tree.chances > chance) | ((tree.chances == chance) & (index < node)))
            self.ranks.append(int(at[0]))
            self.chances.append(float(chance))
            self.likelier.append(np.bincount(depths[above], minlength=DEPTH + 1)[1:])
        self.found.append(depth)
        over = used[:, None] & (tree.chances[:, None] > np.array(THRESHOLDS))
        self.sizes.append(over.sum(0))
        self.levels.append((over * depths[:, None]).max(0))

    def texts(self) -> Texts:
        """All of them."""

        def counts(values: Sequence[object], *shape: int) -> np.ndarray:
            return np.minimum(np.array(values, dtype=np.int64).reshape(-1, *shape), 255).astype(np.uint8)

        return Texts(
            lengths=np.array(self.lengths, dtype=np.int32),
            stopped=np.array(self.stopped, dtype=np.bool_),
            found=counts(self.found),
            ranks=counts(self.ranks),
            chances=quantised(np.array(self.chances, dtype=np.float64)),
            likelier=counts(self.likelier, DEPTH),
            sizes=counts(self.sizes, len(THRESHOLDS)),
            levels=counts(self.levels, len(THRESHOLDS)),
        )


def collect(
    target: Target,
    new_drafter: Callable[[], Drafter],
    head: str,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float] = (0.0, 1.0),
    *,
    num_tokens: int = TOKENS,
    on_progress: Callable[[int, int], None] | None = None,
) -> HeldOut:
    """Let the target go on from each prompt at each temperature, plainly, while the drafter watches.

    Args:
        head: ``head_id`` of the drafter's head.
        prompts: ids, of text that the head was not trained on.
        num_tokens: positions of each text; a few more tokens are written, to know what follows the last one.
        on_progress: called with (done, total) tokens.

    Raises:
        ConfigError: no prompt leaves room for a text, or no temperature is given.
    """
    if not temperatures:
        raise ConfigError("held-out statistics need at least one temperature: give 0, 1 or both")
    chosen, written = fitting(prompts, target, num_tokens), num_tokens + DEPTH
    if not chosen:
        raise ConfigError(
            f"held-out statistics need prompts of 2 to {target.max_length - written - DEPTH} tokens, found none among "
            f"{len(prompts)}: give shorter ones"
        )
    total, done, found, runs_as = len(temperatures) * len(chosen) * written, 0, {}, ""
    for temperature in temperatures:
        watched = _Watched(new_drafter())
        engine = Engine(Decoder(target, watched, budget=REFERENCE), max_batch=MAX_BATCH)
        requests: dict[int, Request] = {}
        for number, prompt in enumerate(chosen):
            sampling = Sampling(temperature=temperature, max_tokens=written, seed=number)
            request = engine.submit(prompt, sampling)
            requests[request.id] = request
        trees: dict[int, list[_Grown]] = {number: [] for number in requests}
        columns = _Columns()
        for step in engine.steps():
            for emitted, grown in zip(step.rows, _grown(watched.tree), strict=True):
                number = emitted.request_id
                trees[number].append(grown)
                done += 1
                if emitted.finish_reason is not None:
                    request, own = requests[number], trees.pop(number)
                    done += written - len(own)
                    if request.error is not None:
                        raise request.error
                    columns.add(request, own, num_tokens)
            if on_progress is not None:
                on_progress(done, total)
        found[float(temperature)] = columns.texts()
        runs_as = watched.runs_as
    context = sum(map(len, chosen)) / len(chosen) + num_tokens / 2
    return HeldOut(head, target.name, runs_as, context, found)


def fitting(prompts: Sequence[Sequence[int]], target: Target, num_tokens: int = TOKENS) -> list[Sequence[int]]:
    """Those that leave room for a text and what may be drafted at its end."""
    return [prompt for prompt in prompts if 1 < len(prompt) <= target.max_length - num_tokens - 2 * DEPTH]


def _grown(tree: DraftTree | None) -> list[_Grown]:
    if tree is None or tree.confidence is None:
        raise ConfigError(
            "a forecast needs a drafter that says how likely its nodes are (DraftTree.confidence): measure with "
            "`draftwing compare`"
        )
    columns = (tree.tokens.cpu().numpy(), tree.parents.cpu().numpy(), tree.confidence.float().cpu().numpy())
    return [
        _Grown(tokens.copy(), np.where(tokens == PAD, PAD, parents), chances.copy())
        for tokens, parents, chances in zip(*columns, strict=True)
    ]


def _depths_collect(parents: np.ndarray) -> np.ndarray:
    """Of each node from its parent's, which comes before it; 0 for the root and for unused nodes."""
    depths = np.zeros(len(parents), dtype=np.int64)
    has_parent = parents >= 0
    for _ in range(DEPTH):
        depths = np.where(has_parent, depths[parents] + 1, 0)
    return depths


# Tau and speedup of a head for trees and a machine, before anything is decoded; and beside what is then measured.


@dataclass(frozen=True)
class Forecast:
    """Of one tree at one temperature.

    Attributes:
        tree: as the user named it; ``auto`` is the automatic budget, which is only approximated.
        tau: tokens emitted per target forward; ``tau_low`` and ``tau_high`` its 95% interval, by bootstrap over texts.
        nodes, levels: of a step in the mean.
        speedup: over plain decoding on a machine whose costs are known, at batch 1; None without.
        measured_tau, measured_speedup: None where nothing was decoded.
    """

    tree: str
    temperature: float
    tau: float
    tau_low: float
    tau_high: float
    nodes: float
    levels: float
    speedup: float | None = None
    measured_tau: float | None = None
    measured_speedup: float | None = None

    @property
    def error(self) -> float | None:
        """Of tau: forecast over measured, minus 1."""
        return None if self.measured_tau is None else self.tau / self.measured_tau - 1

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "error": self.error}


def forecast(
    held_out: HeldOut,
    trees: Mapping[str, Budget | None],
    temperatures: Sequence[float],
    costs: Costs | None = None,
) -> list[Forecast]:
    """Every tree at every temperature.

    Args:
        trees: by name; None is the automatic budget.
        costs: of the machine, where speedups are wanted.

    Raises:
        ConfigError: a temperature or a tree that the statistics do not cover, or the automatic budget without costs.
    """
    found = []
    for temperature in temperatures:
        texts = held_out.of(temperature)
        for name, budget in trees.items():
            if budget is not None:
                way = walk(texts, budget)
                speedup = None if costs is None else _speedup(way, _effort(budget, costs), costs, held_out.context)
            elif costs is None:
                raise ConfigError("what the automatic budget drafts follows from a machine's costs: name trees instead")
            else:
                ways = [walk_above(texts, place) for place in range(len(THRESHOLDS))]
                each = [_speedup(one, one.levels, costs, held_out.context) for one in ways]
                speedup = max(each)
                way = ways[each.index(speedup)]
            low, high = way.interval()
            found.append(Forecast(name, temperature, way.tau, low, high, way.nodes, way.levels, speedup))
    return found


def measured(
    forecasts: Sequence[Forecast],
    lm: LM,
    trees: Mapping[str, Budget | None],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Forecast]:
    """The same with what decoding the prompts gives, each prompt with every tree in turn; see ``compare``.

    Args:
        sampling: how texts are written, but for the temperature.
    """
    plain = LM(lm.target, lm.tokenizer)
    lms = [plain, *(LM(lm.target, lm.tokenizer, lm.new_drafter, lm.rule, budget) for budget in trees.values())]
    temperatures = list(dict.fromkeys(each.temperature for each in forecasts))
    known: dict[tuple[str, float], tuple[float, float]] = {}
    for number, temperature in enumerate(temperatures):

        def tell(done: int, total: int, before: int = number) -> None:
            if on_progress is not None:
                on_progress(before * total + done, total * len(temperatures))

        _, *methods = compare(lms, prompts, replace(sampling, temperature=temperature), on_progress=tell).methods
        known |= {
            (name, temperature): (method.tau, method.speedup) for name, method in zip(trees, methods, strict=True)
        }
    return [
        replace(each, measured_tau=tau, measured_speedup=speedup)
        for each in forecasts
        for tau, speedup in [known[each.tree, each.temperature]]
    ]


def _speedup(way: Walk, effort: float, costs: Costs, context: float) -> float:
    """Over plain decoding: tokens of a step over what it takes, in plain steps."""
    plain = costs.verify_seconds(1, 1, context)
    # T_V of a whole number of nodes, and between two of them.
    low = int(way.nodes)
    verify = [costs.verify_seconds(low + 1 + more, 1, context) for more in (0, 1)]
    takes = verify[0] + (way.nodes - low) * (verify[1] - verify[0])
    return way.tau * plain / (takes + costs.draft_seconds(effort))


def _effort(budget: Budget, costs: Costs) -> float:
    """Levels of drafting, those of several nodes counted as more (see ``DraftTree.num_draft_forwards``)."""
    share = costs.node_share
    if budget.paths is not None:
        widths = [1, *(len(level.expanded) for level in static_levels(budget.paths)[:-1])]
        return sum(1 + (width - 1) * share for width in widths)
    return min(budget.depth, 1) + max(budget.depth - 1, 0) * (1 + (budget.width - 1) * share)
