"""Drafters that run a network: each draft is one request to its runner, so that the target may verify in the same call.

``EagleDrafter`` drafts with networks that read the target's features (EAGLE, 2401.15077, 2406.16858, 2503.01840). Its
KV cache has entry i (the feature at position i with the token after it) in slot i, so the root of a tree is the entry
before the pending token, in slot ``length - 1``. While a tree grows, features are the network's predictions; after the
step the accepted path is fed again with the target's features, in one forward.

Shape suffixes: B rows, W entries, P nodes on a path, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.methods.base import Budget, Drafter, swap_remove
from draftwing.methods.net import DraftNet
from draftwing.models.context import Context, FeatureSpec, Row, TargetOutput
from draftwing.models.linear import Linear, runs_as
from draftwing.models.target import Target
from draftwing.runtime.forward import Runner
from draftwing.runtime.tree_builder import Drafted, DraftRequest, VerifyRequest
from draftwing.sampling import SamplingBatch
from draftwing.torch_utils import clear, inference, joined, put
from draftwing.tree import Accepted, DraftTree


class NetDrafter(Drafter):
    """Splits ``propose`` into a request, the draft, and the drafter's use of the result."""

    runner: Runner  # runs the network over its KV slots
    is_one_request = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "propose" in cls.__dict__ and "is_one_request" not in cls.__dict__:
            cls.is_one_request = False

    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        """Return the trees to draft, or None to draft nothing. May be called again for a repeated step."""
        raise NotImplementedError

    def draft(self, request: DraftRequest, verify: VerifyRequest | None = None) -> Drafted:
        """Grow the trees, and verify them in the same call if the runner can."""
        return self.runner.draft(request, verify)

    def receive(self, ctx: Context, drafted: Drafted) -> DraftTree:
        """Take the result of ``draft``, and return the trees to propose."""
        return drafted.tree

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Return trees in the shape of ``budget`` (see ``runtime.tree_builder``)."""
        request = self.request(ctx, sampling, budget)
        return ctx.roots() if request is None else self.receive(ctx, self.draft(request))


class PendingFeatures:
    """Features of kept tokens that a network has not read yet: each row's entries since the last draft, in order."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []  # (W, F) of each row, before those of all steps
        # For each step (B, at least a row's entries, F), and the rows' lengths before it.
        self._steps: list[tuple[Tensor, list[int]]] = []

    def add(self, features: Tensor, lengths: list[int]) -> None:
        """Add a step's features (B, W, F) of rows that had ``lengths`` before; values past a row's end are ignored."""
        self._steps.append((features, lengths))

    def clear(self) -> None:
        """Drop everything after it has been read."""
        self._rows, self._steps = [row[:0] for row in self._rows], []

    def admit(self, first: Tensor, lengths: Sequence[int]) -> None:
        """Add a row after those of ``lengths``, with entries ``first`` (1, W, F); W may be 0."""
        self._rows = [*self._by_row(lengths), first[0]]

    def remove(self, row: int, lengths: Sequence[int]) -> None:
        """Drop a row; the last of ``lengths`` takes its place."""
        swap_remove(self._by_row(lengths), row)

    def joined(self, lengths: Sequence[int]) -> Tensor:
        """Return (B, W, F) for rows that have ``lengths`` now; W is at least the largest number of entries of a row."""
        if len(self._steps) == 1 and not any(map(len, self._rows)):
            return self._steps[0][0]
        rows = self._by_row(lengths)
        longest = max(1, *map(len, rows))
        if len(rows) == 1 and len(rows[0]) == longest:
            return rows[0][None]
        padded = rows[0].new_empty((len(rows), longest, rows[0].shape[1]))
        clear(padded)
        for into, row in zip(padded, rows, strict=True):
            put(into[: len(row)], row)
        return padded

    def _by_row(self, lengths: Sequence[int]) -> list[Tensor]:
        """Return each row's entries, with those of the steps appended."""
        bounds = list(pairwise([*(starts for _, starts in self._steps), lengths]))
        for row, entries in enumerate(self._rows):
            steps = zip(self._steps, bounds, strict=True)
            pieces = [features[row, : ends[row] - starts[row]] for (features, _), (starts, ends) in steps]
            self._rows[row] = joined([entries, *pieces], 0)
        self._steps = []
        return self._rows


class EagleDrafter(NetDrafter):
    """Drafts with ``net`` for ``target``; ``identity`` distinguishes the head from others of the same name."""

    grows_by_rule = resumes = True

    def __init__(self, net: DraftNet, target: Target, name: str = "", identity: str = "") -> None:
        config = net.config
        if config.vocab_size != target.vocab_size or max(config.taps) > target.num_layers:
            raise ConfigError(
                f"the head reads taps {config.taps} of a target with a vocabulary of {config.vocab_size}; "
                f"{target.name} has {target.num_layers} layers and {target.vocab_size} tokens: use a head trained "
                f"for it"
            )
        self.name = net.kind if name in ("", net.kind) else f"{net.kind} ({name})"
        self.features = FeatureSpec(config.taps)
        matrices = [part for part in net.modules() if isinstance(part, Linear)]
        num_bytes = sum(matrix.num_bytes for matrix in matrices)
        self.identity = f"{identity} {config} {net.dtype} {num_bytes}"
        self.num_bytes = num_bytes + (target.head.num_bytes if net.head is None else 0)
        self.runs_as = runs_as(matrices)
        self.net, self.runner = net, net.runs.runner(net, self)
        self._dtype, self._calibration, self._shift = net.dtype, config.calibration, int(net.shape.is_shifted)
        self._min_length = 1  # shorter rows get no draft: a prompt of one token has no feature to start from
        self._fed: list[int] = []  # entries of each row whose slots hold true features
        self._unread = PendingFeatures()
        self._read: list[int] | None = None  # entries of each row once the current step counts; it may be undone

    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Feed the prompt's entries except the last, the root of the first tree."""
        if features is None:
            raise ConfigError(
                f"{self.name} reads hidden states, and the target returned none for the prompt: see FeatureSpec"
            )
        row, features = ctx.rows[-1], features.to(self._dtype)
        fed = row.resumed + max(features.shape[1] - 1, 0)
        self.read_on(ctx, row, features[:, : fed - row.resumed], fed)
        self._unread.admit(features[:, -1:], [row.length for row in ctx.rows[:-1]])
        self._fed.append(fed)
        self._read = None

    @property
    def num_read(self) -> list[int]:
        return list(self._fed)

    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        assert features is not None
        tokens = row.tokens[row.resumed + self._shift : stop + self._shift]
        self.runner.prefill(len(self._fed), tokens, features.to(self._dtype), start=row.resumed)

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's slots; the last row takes its place."""
        self._unread.remove(row, ctx.lengths)
        self.runner.cache.move_row(len(self._fed) - 1, row)
        swap_remove(self._fed, row)
        self._read = None

    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        active = [row.length >= self._min_length for row in ctx.rows]
        if budget.depth == 0 or not any(active):
            return None
        fed, shift = self._fed, self._shift
        tokens = [row.tokens[start + shift : row.length + shift] for row, start in zip(ctx.rows, fed, strict=True)]
        self._read = [row.length for row in ctx.rows]
        roots = [max(length - 1, 0) for length in self._read]
        features = self._unread.joined(self._read)
        return DraftRequest(ctx, active, sampling, budget, self._calibration, tokens, fed, roots, features)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the true features of the accepted path until the next draft."""
        fresh = output.features if output.accepted is not None else output.features_on(tree, accepted.path)
        if fresh is None:
            raise ConfigError(
                f"{self.name} reads hidden states, and the target's forward returned none: it must return the features "
                f"that its context requests (TargetOutput.features)"
            )
        if self._read is not None:
            self._unread.clear()
            self._fed, self._read = self._read, None
        self._unread.add(fresh.to(self._dtype), [row.length for row in ctx.rows])
