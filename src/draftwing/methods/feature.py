"""The drafter of networks that read the target's features: EAGLE heads (2401.15077, 2406.16858, 2503.01840).

Its KV cache has entry i (the feature at position i with the token after it) in slot i, so the root of a tree is the
entry before the pending token, in slot ``length - 1``. While a tree grows, features are the network's own predictions;
after the step the accepted path is fed again with the target's true features, in one forward.

Shape suffixes: B rows, W entries, P nodes on a path, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.methods.base import Budget
from draftwing.methods.net import DraftNet
from draftwing.methods.net_drafter import NetDrafter, PendingFeatures
from draftwing.models.context import Context, FeatureSpec, Row, TargetOutput
from draftwing.models.linear import Linear, runs_as
from draftwing.models.target import Target
from draftwing.runtime.tree_builder import DraftRequest
from draftwing.sampling import SamplingBatch
from draftwing.torch_utils import inference
from draftwing.tree import Accepted, DraftTree


class EagleDrafter(NetDrafter):
    """Drafts with ``net`` for ``target``.

    Args:
        identity: distinguishes the head from others in cached measurements.

    Raises:
        ConfigError: the net reads features that the target does not have.
    """

    grows_by_rule = resumes = True

    def __init__(self, net: DraftNet, target: Target, name: str = "", identity: str = "") -> None:
        config = net.config
        if config.vocab_size != target.vocab_size or max(config.taps) > target.num_layers:
            raise ConfigError(
                f"the head reads taps {config.taps} of a target with a vocabulary of {config.vocab_size}; "
                f"{target.name} has {target.num_layers} layers and {target.vocab_size} tokens: use a head trained "
                f"for it"
            )
        self.name = net.kind + (f" ({name})" if name else "")
        self.features = FeatureSpec(config.taps)
        # The time of a draft depends on the network's shape and on the layout of its matrices.
        matrices = [part for part in net.modules() if isinstance(part, Linear)]
        num_bytes = sum(matrix.num_bytes for matrix in matrices)
        self.identity = f"{identity} {config} {net.dtype} {num_bytes}"
        self.num_bytes = num_bytes + (target.head.num_bytes if net.head is None else 0)
        self.runs_as = runs_as(matrices)
        self.net, self._runner = net, net.runs.runner(net, self)
        self._dtype, self._calibration, self._shift = net.dtype, config.calibration, int(net.shape.is_shifted)
        self._fed: list[int] = []  # entries of each row whose slots hold true features
        self._unread = PendingFeatures()
        self._read: list[int] | None = None  # entries of each row once the current step counts; it may be undone

    # --- the rows --------------------------------------------------------------------------------------------------

    @inference
    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Feed the prompt's entries except the last, the root of the first tree."""
        if features is None:
            raise ConfigError(
                f"{self.name} reads hidden states, and the target gave none for the prompt: see FeatureSpec"
            )
        row, count = ctx.rows[-1], features.shape[1]
        features, fed = features.to(self._dtype), row.resumed + max(count - 1, 0)
        tokens = row.tokens[row.resumed + self._shift : fed + self._shift]
        self._prefill(len(self._fed), tokens, features[:, : len(tokens)], row.resumed)
        self._unread.admit(features[:, -1:], [row.length for row in ctx.rows[:-1]])
        self._fed.append(fed)
        self._read = None

    @property
    def num_read(self) -> list[int]:
        return list(self._fed)

    @inference
    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        assert features is not None
        tokens = row.tokens[row.resumed + self._shift : stop + self._shift]
        self._prefill(len(self._fed), tokens, features.to(self._dtype), row.resumed)

    def _prefill(self, row: int, ids: Sequence[int], features: Tensor, start: int) -> None:
        """Feed features (1, T, F) of a prompt to a row, from slot ``start`` on."""
        self._runner.prefill(row, ids, features, start=start)

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's slots; the last row takes its place."""
        self._unread.remove(row, [other.length for other in ctx.rows])
        self._runner.cache.move_row(len(self._fed) - 1, row)
        self._fed[row] = self._fed[-1]
        self._fed.pop()
        self._read = None

    # --- a step ----------------------------------------------------------------------------------------------------

    @inference
    def request(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftRequest | None:
        active = self._active(ctx)
        if budget.depth == 0 or not any(active):
            return None
        fed, shift = self._fed, self._shift
        tokens = [row.tokens[start + shift : row.length + shift] for row, start in zip(ctx.rows, fed, strict=True)]
        self._read = [row.length for row in ctx.rows]
        roots = [max(length - 1, 0) for length in self._read]
        features = self._unread.joined(self._read)
        return DraftRequest(ctx, active, sampling, budget, self._calibration, tokens, fed, roots, features)

    def _active(self, ctx: Context) -> list[bool]:
        """Return the rows to draft for: a prompt of one token has no feature to start from."""
        return [row.length > 0 for row in ctx.rows]

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the true features of the accepted path until the next draft."""
        fresh = output.features_on(tree, accepted.path)
        if fresh is None:
            raise ConfigError(
                f"{self.name} reads hidden states, and the target's forward gave none: let it return the features that "
                f"its context asks for (TargetOutput.features)"
            )
        if self._read is not None:
            self._unread.clear()
            self._fed, self._read = self._read, None
        fresh = fresh if fresh.dtype == self._dtype else fresh.to(self._dtype)
        self._unread.add(fresh, [row.length for row in ctx.rows])
