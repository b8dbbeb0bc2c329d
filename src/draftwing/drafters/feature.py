"""A net that reads the target's features as the drafter: an EAGLE head (2401.15077, 2406.16858, 2503.01840).

It keeps KV slots of its own: entry i (the feature at position i with the token after it) lies in slot i, so that the
root of a tree is the entry before the pending token, in slot ``length - 1``. While a tree grows, an entry's feature is
the net's own guess; after the step the accepted path is fed again with the target's true features, in one forward.

Shape suffixes: B rows, W entries, P nodes on a path, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwing.drafters.base import Budget, Traits
from draftwing.drafters.growing.asked import Asked
from draftwing.drafters.unread import Unread
from draftwing.errors import ConfigError
from draftwing.inference import inference
from draftwing.model.linear import Linear, runs_as
from draftwing.model.target import Context, FeatureSpec, Row, Target, TargetOutput
from draftwing.nets.base import DraftNet
from draftwing.run.request import Drafted, Waiting
from draftwing.sampling import SamplingBatch
from draftwing.tree import Accepted, DraftTree

__all__ = ["EagleDrafter"]


class EagleDrafter:
    """Drafts with ``net`` for ``target``.

    Args:
        identity: what tells it from other heads, for what was measured with it.

    Raises:
        ConfigError: the net reads features that the target does not have.
    """

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
        # What a draft takes depends on the net's shape and on how its matrices are read.
        matrices = [part for part in net.modules() if isinstance(part, Linear)]
        num_bytes = sum(matrix.num_bytes for matrix in matrices)
        self.traits = Traits(
            reads_features=True,
            grows_by_rule=True,
            hands_on=True,
            resumes=True,
            identity=f"{identity} {config} {net.dtype} {num_bytes}",
            num_bytes=num_bytes + (target.head.num_bytes if net.head is None else 0),
            runs_as=runs_as(matrices),
        )
        self.net, self._runner = net, net.runs.runner(net, self)
        self._dtype, self._calibration, self._shift = net.dtype, config.calibration, int(net.shape.is_shifted)
        self._fed: list[int] = []  # entries of each row whose slots hold true features
        self._unread = Unread()
        self._read: list[int] | None = None  # entries of each row once the step that drafts is done: it may never be

    # --- the rows --------------------------------------------------------------------------------------------------

    @inference
    def admit(self, ctx: Context, features: Tensor | None) -> None:
        """Feed the prompt's entries but the last, which waits to be the first tree's root."""
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
        """See ``Resuming``."""
        return list(self._fed)

    @inference
    def read_on(self, ctx: Context, row: Row, features: Tensor | None, stop: int) -> None:
        """See ``Resuming``."""
        assert features is not None
        tokens = row.tokens[row.resumed + self._shift : stop + self._shift]
        self._prefill(len(self._fed), tokens, features.to(self._dtype), row.resumed)

    def _prefill(self, row: int, ids: Sequence[int], features: Tensor, start: int) -> None:
        """Feed the entries of a prompt, (1, T, F), to a row, from the slot ``start`` on."""
        self._runner.prefill(row, ids, features, start=start)

    @inference
    def remove(self, ctx: Context, row: int) -> None:
        """Drop the row's slots; the last row takes its place."""
        self._unread.remove(row, [each.length for each in ctx.rows])
        self._runner.cache.move_row(len(self._fed) - 1, row)
        self._fed[row] = self._fed[-1]
        self._fed.pop()
        self._read = None

    # --- a step ----------------------------------------------------------------------------------------------------

    @inference
    def propose(self, ctx: Context, sampling: SamplingBatch, budget: Budget) -> DraftTree:
        """Grow a tree in the shape that ``budget`` asks for (see ``growth``)."""
        wanted = [row.length > 0 for row in ctx.rows]  # a prompt of one token has no feature to start from
        if budget.depth == 0 or not any(wanted):
            return ctx.roots()
        asked = Asked(ctx, wanted, sampling, budget, self._calibration)
        return self._draft(self._waiting(ctx), asked).tree

    def _draft(self, waiting: Waiting, asked: Asked) -> Drafted:
        """Read what is waiting and grow the trees: each level by a pass of the net."""
        return self._runner.draft(waiting, asked)

    def observe(self, ctx: Context, tree: DraftTree, accepted: Accepted, output: TargetOutput) -> None:
        """Keep the true features of the accepted path until a tree is drafted again."""
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

    # --- what waits ------------------------------------------------------------------------------------------------

    def _waiting(self, ctx: Context) -> Waiting:
        """Each row's entries since the last draft."""
        fed, shift = self._fed, self._shift
        tokens = [row.tokens[start + shift : row.length + shift] for row, start in zip(ctx.rows, fed, strict=True)]
        self._read = [row.length for row in ctx.rows]
        roots = [max(length - 1, 0) for length in self._read]
        return Waiting(tokens, fed, roots, self._unread.joined(self._read))
