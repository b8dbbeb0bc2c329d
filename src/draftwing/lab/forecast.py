"""Forecast a head's tau and speedup for any tree, from statistics of held-out texts.

At each position of a text that the target wrote, the drafter grows one large *reference tree*. The statistics keep what
decides whether another tree would have held the next tokens: which child of its parent each of them was, and how many
nodes of each level were likelier. Tau of a chain, static or dynamic tree then follows by walking along the texts like
decoding does. Unlike a table of acceptance rates, a walk reflects that positions after a rejection are harder, and
that hard positions come in runs.

The file in the head's folder has some tens of kilobytes, and reading it needs no model.

Shape suffixes: T texts, P positions of all texts in order, E nodes on the texts' own paths, L levels, N nodes of a
reference tree.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from draftwing.budget.costs import Costs
from draftwing.decode import Decoder
from draftwing.engine import Engine
from draftwing.errors import CheckpointError, ConfigError
from draftwing.formats.identity import head_id
from draftwing.methods.base import Budget, Drafter
from draftwing.models.context import Context, TargetOutput
from draftwing.models.target import Target
from draftwing.request import Request
from draftwing.runtime.tree_builder import static_levels
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.shipped import SHIPPED
from draftwing.storage import cache_folder, check_regular, private_folder, replacing, writing
from draftwing.tree import PAD, Accepted, DraftTree

FILE = "held_out.npz"  # in a head's folder
_CACHE = "held-out"  # folder in the cache for statistics of heads that ship with Draftwing
DEPTH, WIDTH = 10, 10  # the reference tree
REFERENCE = Budget(DEPTH, WIDTH, nodes=WIDTH + (DEPTH - 1) * WIDTH * WIDTH)  # keeps every node that it scores
TOKENS, MAX_BATCH = 128, 16  # tokens per collected text, and texts that are decoded at once
_FORMAT = {"format": 1, "depth": DEPTH, "width": WIDTH}
_MAX_FILE_BYTES = 64 * 2**20  # far more than any collection writes


# --- statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForecastTexts:
    """The texts of one temperature. Counts are at most 255."""

    lengths: np.ndarray  # (T,) int32: positions of each text
    stopped: np.ndarray  # (T,) bool: the text ended by itself, so that no step emits more
    found: np.ndarray  # (P,) uint8: how many of a position's next tokens the reference tree has as one path
    ranks: np.ndarray  # (E,) uint8: which child of its parent each node of these paths is
    likelier: np.ndarray  # (E, L) uint8: nodes of each level that are likelier, or as likely and first in the tree

    def __post_init__(self) -> None:
        texts, positions, nodes = len(self.lengths), len(self.found), len(self.ranks)
        shapes: dict[str, tuple[int, ...]] = {"lengths": (texts,), "stopped": (texts,), "found": (positions,)}
        shapes |= {"ranks": (nodes,), "likelier": (nodes, DEPTH)}
        for name, shape in shapes.items():
            value = getattr(self, name)
            dtype = np.dtype({"lengths": np.int32, "stopped": np.bool_}.get(name, np.uint8))
            if value.shape != shape or value.dtype != dtype:
                raise ConfigError(
                    f"held-out statistics: `{name}` must be {dtype.name} of shape {shape}, found {value.dtype.name} of "
                    f"{value.shape}: collect them again"
                )
        has_texts = texts > 0 and self.lengths.min() > 0 and self.lengths.sum(dtype=np.int64) == positions
        if not has_texts or self.found.max() > DEPTH or self.found.sum(dtype=np.int64) != nodes:
            raise ConfigError(
                f"held-out statistics: the lengths of {texts} texts must add up to {positions} positions, whose paths "
                f"are at most {DEPTH} deep and add up to {nodes} nodes: collect them again"
            )

    @cached_property
    def depths(self) -> np.ndarray:
        """(E,) depth of each node, from 1."""
        lengths = self.found.astype(np.int64)
        return np.arange(len(self.ranks)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1

    @cached_property
    def level_ranks(self) -> np.ndarray:
        """(E,) likelier nodes of the same level."""
        ranks: np.ndarray = self.likelier[np.arange(len(self.ranks)), self.depths - 1]
        return ranks

    def is_scored(self, width: int) -> np.ndarray:
        """(E,) True if a tree that expands ``width`` nodes of each level, with as many children, scores the node."""
        parent_ranks = np.concatenate([[0], self.level_ranks[:-1]])  # the nodes of a path are consecutive
        scored: np.ndarray = (self.ranks < width) & ((self.depths == 1) | (parent_ranks < width))
        return scored

    def prefixes(self, keeps: np.ndarray) -> np.ndarray:
        """(P,) nodes at the start of each path for which ``keeps`` (E,) is True."""
        by_depth = np.zeros((len(self.found), DEPTH), dtype=bool)
        by_depth[np.repeat(np.arange(len(self.found)), self.found), self.depths - 1] = keeps
        counts: np.ndarray = np.logical_and.accumulate(by_depth, axis=1).sum(1)
        return counts


_ARRAYS = tuple(field.name for field in fields(ForecastTexts))


@dataclass(frozen=True)
class HeldOut:
    """The held-out statistics of a head."""

    head: str  # its ``head_id``; ``target`` is the target's name, ``runs_as`` what computed the head's matrices
    target: str
    runs_as: str
    context: float  # mean number of tokens of a row
    texts: Mapping[float, ForecastTexts]  # by temperature

    def at(self, temperature: float) -> ForecastTexts:
        if float(temperature) not in self.texts:
            collected = ", ".join(f"{other:g}" for other in sorted(self.texts))
            raise ConfigError(
                f"the head's held-out statistics are of temperature {collected}, not of {temperature:g}: forecast "
                f"those, or collect others with `draftwing predict --collect -T {temperature:g}`"
            )
        return self.texts[float(temperature)]

    def joined(self, older: HeldOut) -> HeldOut:
        """Add the other temperatures of ``older``, if it is of the same head, target and precision."""
        if any(getattr(self, name) != getattr(older, name) for name in ("head", "target", "runs_as")):
            return self
        return replace(self, texts={**older.texts, **self.texts})

    def _origin(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("head", "target", "runs_as", "context")}

    def describe(self) -> dict[str, Any]:
        """Return their origin and size as JSON values."""
        texts = {f"{temperature:g}": self.texts[temperature] for temperature in sorted(self.texts)}
        return {
            **self._origin(),
            "texts": {name: len(one.lengths) for name, one in texts.items()},
            "positions": {name: len(one.found) for name, one in texts.items()},
        }

    def write(self, folder: Path) -> Path:
        """Write the file into a head's folder, atomically, and return its path.

        The installed package is never changed: the file of a head that ships with Draftwing goes to the cache folder.
        """
        file = Path(folder) / FILE
        if (name := _shipped_name(folder)) is not None:
            with writing(Path(_CACHE, name)), private_folder() as cache:
                file = cache.path / _CACHE / name / FILE
                file.parent.mkdir(parents=True, exist_ok=True)
        about = {**_FORMAT, **self._origin(), "texts": list(self.texts)}
        arrays = {"about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}
        for number, texts in enumerate(self.texts.values()):
            arrays |= {f"{name}_{number}": getattr(texts, name) for name in _ARRAYS}
        with writing(file), replacing(file) as partial, partial.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
        return file

    @classmethod
    def read(cls, folder: Path) -> HeldOut:
        """Read the file in a head's folder, or of a shipped head the one that ``write`` put into the cache folder.

        Raises CheckpointError if there is none, or one made with other weights.
        """
        name, cache = _shipped_name(folder), cache_folder()
        if name is not None and cache is not None:
            with suppress(CheckpointError):  # none was collected, or another version of Draftwing did
                return cls._read(cache / _CACHE / name / FILE, folder)
        return cls._read(Path(folder) / FILE, folder)

    @classmethod
    def _read(cls, file: Path, folder: Path) -> HeldOut:
        collect = f"collect them with `draftwing predict --collect --draft {folder}` and the head's target and prompts"
        if not file.exists():
            raise CheckpointError(f"{folder}: has no held-out statistics ({FILE}), which a forecast needs: {collect}")
        try:
            check_regular(file)
            if file.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"it has more than {_MAX_FILE_BYTES:,} bytes")
            held_out = cls._parse(file.read_bytes())
        except (EOFError, OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{file}: not readable as held-out statistics ({error}): {collect}") from error
        if held_out.head != head_id(Path(folder)):
            raise CheckpointError(
                f"{file}: these held-out statistics were made with other weights than the head has now: {collect}"
            )
        return held_out

    @classmethod
    def _parse(cls, data: bytes) -> HeldOut:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes().decode())
            if not isinstance(about, dict) or {name: about.get(name) for name in _FORMAT} != _FORMAT:
                raise ValueError("they are of another version")
            texts = {
                float(temperature): ForecastTexts(**{name: arrays[f"{name}_{number}"] for name in _ARRAYS})
                for number, temperature in enumerate(about["texts"])
            }
        origin = {name: str(about[name]) for name in ("head", "target", "runs_as")}
        return cls(**origin, context=float(about["context"]), texts=texts)


def _shipped_name(folder: Path) -> str | None:
    """Return a head's name below the package's ``shipped`` folder; None for any other head."""
    folder, shipped = Path(folder).resolve(), SHIPPED.resolve()
    return str(folder.relative_to(shipped)) if folder.is_relative_to(shipped) else None


# --- walks -----------------------------------------------------------------------------------------------------------
#
# A step with a chain or static tree accepts a text's next tokens while the ranks of their path are in the tree. With a
# dynamic tree, each node must be among the ``width`` best nodes of its level (else it has no children) and the
# ``nodes`` best nodes of the tree. Both are exact on the collected texts, except for nodes of static trees that the
# reference tree lacks, and for dynamic trees narrower than it, whose tau is slightly too small.


@dataclass(frozen=True)
class Walk:
    """The steps that decoding would take."""

    tokens: np.ndarray  # (T,) tokens emitted for each text
    steps: np.ndarray  # (T,) target forwards
    nodes: int  # verified in each step besides the root

    @property
    def tau(self) -> float:
        """Tokens emitted per target forward."""
        return float(self.tokens.sum() / self.steps.sum())

    def interval(self) -> tuple[float, float]:
        """Return the 95% interval of tau: a bootstrap over texts with a fixed seed."""
        generator = np.random.default_rng(0)
        chosen = generator.integers(len(self.steps), size=(1000, len(self.steps)))
        low, high = np.quantile(self.tokens[chosen].sum(1) / self.steps[chosen].sum(1), (0.025, 0.975))
        return float(low), float(high)


def walk(texts: ForecastTexts, budget: Budget) -> Walk:
    """Walk with the trees of a budget. Raises ConfigError if they are deeper or wider than the reference tree."""
    if budget.depth > DEPTH or budget.width > WIDTH:
        raise ConfigError(
            f"{budget}: held-out statistics reach {DEPTH} levels of {WIDTH} nodes, and this tree has {budget.depth} of "
            f"{budget.width}: forecast a smaller one, or measure it with `draftwing compare --tree`"
        )
    num_scored = budget.width + max(budget.depth - 1, 0) * budget.width**2
    nodes = len(budget.shape()) if budget.nodes is None else min(budget.nodes, num_scored)
    return Walk(*_steps(texts, accepted(texts, budget)), nodes)


def accepted(texts: ForecastTexts, budget: Budget) -> np.ndarray:
    """(P,) drafted tokens that a step at each position would accept."""
    if budget.paths is None and not budget.is_chain:
        if budget.nodes is None:
            keeps = texts.level_ranks < budget.width
        else:
            rivals = np.where(np.arange(DEPTH) < budget.depth, texts.likelier, 0).sum(1)
            keeps = (rivals < budget.nodes) & texts.is_scored(budget.width)
        return texts.prefixes(keeps & (texts.depths <= budget.depth))
    paths, ranks, counts, start = set(budget.shape()), texts.ranks.tolist(), [], 0
    for length in texts.found.tolist():
        path = tuple(ranks[start : start + length])
        start += length
        counts.append(next((depth for depth in range(length) if path[: depth + 1] not in paths), length))
    return np.array(counts, dtype=np.int64)


def _steps(texts: ForecastTexts, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (T,) tokens and steps of each text."""
    tokens, steps, start, num_accepted = [], [], 0, counts.tolist()
    for length, stopped in zip(texts.lengths.tolist(), texts.stopped.tolist(), strict=True):
        position = num_steps = 0
        while position < length:
            position += num_accepted[start + position] + 1
            num_steps += 1
        tokens.append(length if stopped else position)  # a text that did not stop continues beyond its last position
        steps.append(num_steps)
        start += length
    return np.array(tokens), np.array(steps)


# --- collection ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceTree:
    """(N,) tokens, parents and the draft probability of each node's path; the root is node 0."""

    tokens: np.ndarray
    parents: np.ndarray
    chances: np.ndarray


class _ReferenceDrafter(Drafter):
    """Grow the reference tree in every step, but propose nothing, so that each step decodes one token."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.name, self.identity = drafter, drafter.name, drafter.identity
        self.copy_capabilities(drafter)
        self.trees: list[ReferenceTree] = []

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        self._drafter.admit(ctx, features)

    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        tree = self._drafter.propose(ctx, sampling, REFERENCE)
        if tree.confidence is None:
            raise ConfigError(
                "a forecast needs a drafter that reports how likely its nodes are (DraftTree.confidence): measure with "
                "`draftwing compare`"
            )
        columns = (tree.tokens.cpu().numpy(), tree.parents.cpu().numpy(), tree.confidence.float().cpu().numpy())
        self.trees = [
            ReferenceTree(tokens.copy(), np.where(tokens == PAD, PAD, parents), chances.copy())
            for tokens, parents, chances in zip(*columns, strict=True)
        ]
        return ctx.roots()

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        self._drafter.observe(ctx, tree, accepted, output)

    def remove(self, ctx: Context, row: int) -> None:
        self._drafter.remove(ctx, row)


# Tokens, True if the text ended by itself, and the reference tree of each position: the tree at position i drafts
# ``tokens[i:]``. There may be more tokens than trees.
WrittenText = tuple[Sequence[int], bool, Sequence[ReferenceTree]]


def statistics(texts: Iterable[WrittenText]) -> ForecastTexts:
    columns: dict[str, list[Any]] = {name: [] for name in _ARRAYS}
    for tokens, stopped, trees in texts:
        columns["lengths"].append(len(trees))
        columns["stopped"].append(stopped)
        for position, tree in enumerate(trees):
            _add_position(columns, tree, tokens[position : position + DEPTH])
    counts = {name: np.minimum(np.array(columns[name], dtype=np.int64), 255) for name in ("found", "ranks", "likelier")}
    return ForecastTexts(
        lengths=np.array(columns["lengths"], dtype=np.int32),
        stopped=np.array(columns["stopped"], dtype=np.bool_),
        found=counts["found"].astype(np.uint8),
        ranks=counts["ranks"].astype(np.uint8),
        likelier=counts["likelier"].reshape(-1, DEPTH).astype(np.uint8),
    )


def _add_position(columns: dict[str, list[Any]], tree: ReferenceTree, next_tokens: Sequence[int]) -> None:
    depths = np.zeros(len(tree.parents), dtype=np.int64)  # 0 for the root and for unused nodes
    for _ in range(DEPTH):
        depths = np.where(tree.parents >= 0, depths[tree.parents] + 1, 0)
    used, index = depths > 0, np.arange(len(depths))
    node = length = 0
    for token in next_tokens:
        children = np.flatnonzero((tree.parents == node) & used)
        (ranks,) = np.nonzero(tree.tokens[children] == token)
        if not len(ranks):
            break
        node, length = int(children[ranks[0]]), length + 1
        chance = tree.chances[node]
        likelier = used & ((tree.chances > chance) | ((tree.chances == chance) & (index < node)))
        columns["ranks"].append(int(ranks[0]))
        columns["likelier"].append(np.bincount(depths[likelier], minlength=DEPTH + 1)[1:])
    columns["found"].append(length)


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
    """Let the target continue each prompt at each temperature, and record the drafter's reference trees.

    Args:
        head: ``head_id`` of the drafter's head.
        prompts: token ids, of text that the head was not trained on.
        num_tokens: positions of each text; ``DEPTH`` more tokens are written, to know what follows the last one.
    """
    chosen, max_tokens = fitting(prompts, target, num_tokens), num_tokens + DEPTH
    if not chosen:
        raise ConfigError(
            f"held-out statistics need prompts of 2 to {target.max_length - max_tokens - DEPTH} tokens, found none "
            f"among {len(prompts)}: give shorter ones"
        )
    done, total = 0, len(temperatures) * len(chosen) * max_tokens

    def written(temperature: float, drafter: _ReferenceDrafter) -> Iterator[WrittenText]:
        """Yield each text when it is finished."""
        nonlocal done
        engine = Engine(Decoder(target, drafter, budget=REFERENCE), max_batch=MAX_BATCH)
        running: dict[int, tuple[Request, list[ReferenceTree]]] = {}
        for seed, prompt in enumerate(chosen):
            request = engine.submit(prompt, Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed))
            running[request.id] = request, []
        for step in engine.steps():
            for row, tree in zip(step.rows, drafter.trees, strict=True):
                request, trees = running[row.request_id]
                trees.append(tree)
                done += 1
                if row.finish_reason is not None:
                    del running[row.request_id]
                    if request.error is not None:
                        raise request.error
                    done += max_tokens - len(trees)
                    stopped = request.finish_reason == "stop" and len(request.token_ids) <= num_tokens
                    yield request.token_ids, stopped, trees[:num_tokens]
            if on_progress is not None:
                on_progress(done, total)

    texts, runs_as = {}, ""
    for temperature in temperatures:
        drafter = _ReferenceDrafter(new_drafter())
        texts[float(temperature)] = statistics(written(temperature, drafter))
        runs_as = drafter.runs_as
    context = sum(map(len, chosen)) / len(chosen) + num_tokens / 2
    return HeldOut(head, target.name, runs_as, context, texts)


def fitting(prompts: Sequence[Sequence[int]], target: Target, num_tokens: int = TOKENS) -> list[Sequence[int]]:
    """Select the prompts that leave room for a text and for drafts at its end."""
    return [prompt for prompt in prompts if 1 < len(prompt) <= target.max_length - num_tokens - 2 * DEPTH]


# --- forecasts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """The forecast for one tree at one temperature."""

    tree: str  # as the user named it
    temperature: float
    tau: float
    # tau_low, tau_high: 95% interval over texts
    tau_low: float
    tau_high: float
    nodes: int  # verified in each step besides the root
    speedup: float | None  # over the baseline at batch 1, if the machine's costs are known


def forecast(
    held_out: HeldOut, trees: Mapping[str, Budget], temperatures: Sequence[float], costs: Costs | None = None
) -> list[Forecast]:
    """Forecast every tree, by name, at every temperature."""
    forecasts = []
    for temperature in temperatures:
        texts = held_out.at(temperature)
        for name, budget in trees.items():
            steps, speedup = walk(texts, budget), None
            if costs is not None:  # tokens of a step over its time in steps of the baseline
                verify, baseline = (costs.verify_seconds(count, 1, held_out.context) for count in (steps.nodes + 1, 1))
                speedup = steps.tau * baseline / (verify + costs.draft_seconds(_effort(budget, costs)))
            forecasts.append(Forecast(name, temperature, steps.tau, *steps.interval(), steps.nodes, speedup))
    return forecasts


def _effort(budget: Budget, costs: Costs) -> float:
    """Return the levels of drafting, wider ones counted as more (see ``DraftTree.num_draft_forwards``)."""
    share = costs.node_share
    if budget.paths is not None:
        widths = [1, *(len(level.expanded) for level in static_levels(budget.paths)[:-1])]
        return sum(1 + (width - 1) * share for width in widths)
    return min(budget.depth, 1) + max(budget.depth - 1, 0) * (1 + (budget.width - 1) * share)
