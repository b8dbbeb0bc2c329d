"""Collects held-out statistics: the target writes texts, and the drafter shows at each position what it would draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from draftwing.drafters.base import Budget, Drafter
from draftwing.engine.decode import Decoder
from draftwing.engine.engine import Engine
from draftwing.engine.request import Request
from draftwing.errors import ConfigError
from draftwing.evaluate.forecast.held_out import DEPTH, REFERENCE, THRESHOLDS, HeldOut, Texts, quantised
from draftwing.model.target import Context, Target, TargetOutput
from draftwing.sampling import Sampling, SamplingBatch
from draftwing.tree import PAD, Accepted, DraftTree

__all__ = ["TOKENS", "collect", "fitting"]

TOKENS, MAX_BATCH = 128, 16


class _Watched:
    """A drafter that grows the reference tree in every step, shows it, and proposes nothing of it."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.features, self.traits = drafter.name, drafter.features, drafter.traits
        self.tree: DraftTree | None = None

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """See ``Drafter``, here and below."""
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
        depths = _depths(tree.parents)
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
        runs_as = watched.traits.runs_as
    context = sum(map(len, chosen)) / len(chosen) + num_tokens / 2
    return HeldOut(head, target.name, runs_as, context, found)


def fitting(prompts: Sequence[Sequence[int]], target: Target, num_tokens: int = TOKENS) -> list[Sequence[int]]:
    """Those that leave room for a text and what may be drafted at its end."""
    return [prompt for prompt in prompts if 1 < len(prompt) <= target.max_length - num_tokens - 2 * DEPTH]


def _grown(tree: DraftTree | None) -> list[_Grown]:
    """The trees of all rows."""
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


def _depths(parents: np.ndarray) -> np.ndarray:
    """Of each node from its parent's, which comes before it; 0 for the root and for unused nodes."""
    depths = np.zeros(len(parents), dtype=np.int64)
    has_parent = parents >= 0
    for _ in range(DEPTH):
        depths = np.where(has_parent, depths[parents] + 1, 0)
    return depths
