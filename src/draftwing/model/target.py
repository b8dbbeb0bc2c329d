"""The target as the decode loop sees it, whatever runs it.

Shape suffixes: B rows, N nodes, V vocabulary, F features (width of all taps together), T prompt tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from draftwing.errors import ConfigError, PromptError, UnsupportedError
from draftwing.model.cache import View
from draftwing.model.embedding import Embedding
from draftwing.model.linear import Linear
from draftwing.noise import Walk
from draftwing.penalties import History
from draftwing.run.forward import on_device
from draftwing.run.growing import Asked
from draftwing.run.request import Ahead, Drafted
from draftwing.tree import Accepted, DraftTree

__all__ = ["NO_FEATURES", "Context", "FeatureSpec", "Row", "Target", "TargetOutput", "own_context"]


@dataclass(frozen=True)
class FeatureSpec:
    """Which hidden states a drafter reads, concatenated in this order.

    ``taps`` count as transformers' ``hidden_states`` do: tap i is the input of layer i, tap ``num_layers`` the
    output of the final norm. Empty: none.
    """

    taps: tuple[int, ...] = ()


NO_FEATURES = FeatureSpec()


@dataclass(frozen=True)
class TargetOutput:
    """One forward over a batch of trees.

    Attributes:
        logits: (B, N, V) of the token after each node.
        features: (B, N, F), or None where no taps were asked for.
        tree: the trees with what the forward found out about them, None where that is nothing.
        is_kept: whether logits and features are still there after the next forward; else they need a copy.
        accepted: what is kept of the trees, where the forward was told how to find out: it is committed then, and
            ``features`` are those of the kept nodes, in their order.
        ahead: seconds of it that were spent before it was asked for: by the call that drafted the trees.
    """

    logits: Tensor
    features: Tensor | None = None
    tree: DraftTree | None = None
    is_kept: bool = True
    accepted: Accepted | None = None
    ahead: float = 0.0

    def features_on(self, tree: DraftTree, path: Tensor) -> Tensor | None:
        """(B, at least P, F) of the nodes on each row's ``path`` (B, P) through ``tree``; past a row's end anything."""
        features = self.features
        if features is None or self.accepted is not None or (tree.is_line and self.is_kept):
            return features
        if len(path) == 1:
            return features.index_select(1, path[0].clamp(min=0))
        return features.gather(1, path.clamp(min=0)[:, :, None].expand(-1, -1, features.shape[2]))


@dataclass
class Row:
    """One sequence: its tokens on the host. ``tokens[length]`` is pending: emitted, its keys not yet cached.

    ``references`` are texts, as ids, that its request expects to be repeated: drafters may read them. ``drafts`` names
    those of several drafters that its request chose; None: all.
    ``resumed`` of its slots were written before the row came to a drafter (``Resuming``).
    """

    tokens: list[int]
    length: int
    prompt_length: int
    references: Sequence[Sequence[int]] = ()
    drafts: Sequence[str] | None = None
    resumed: int = 0

    def takes(self, name: str) -> bool:
        """Whether a drafter of this name may propose for it."""
        return self.drafts is None or name in self.drafts


@dataclass
class Context:
    """The running rows, dense: row ``i`` of every tensor is ``rows[i]``. Targets add their caches to it.

    ``features`` are the hidden states that its forwards give out. ``walk`` says how the tokens after the next trees are
    drawn, where whoever drafts them may go on with their verification.
    """

    device: torch.device
    rows: list[Row] = field(default_factory=list)
    features: FeatureSpec = NO_FEATURES
    walk: Walk | None = None

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.rows)

    @property
    def ahead(self) -> Ahead | None:
        """What verifies trees in the call that drafts them; None where that cannot be, or is not asked for."""
        return None

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [row.length for row in self.rows]

    def tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """int64 on the context's device; see ``on_device``."""
        return on_device(values, self.device)

    def pending(self) -> Tensor:
        """(B,) the tokens at the roots of the next trees."""
        return self.tensor([row.tokens[row.length] for row in self.rows])

    def roots(self) -> DraftTree:
        """Trees of nothing but these tokens: ordinary decoding."""
        if self.device.type != "cpu":
            return DraftTree.root(self.pending())
        tokens = np.array([[row.tokens[row.length]] for row in self.rows], np.int64)  # a third of what tensors take
        return DraftTree(torch.from_numpy(tokens), torch.from_numpy(np.full_like(tokens, -1)), is_line=True, depth=0)

    def history(self) -> History:
        """The committed tokens as padded tensors, for penalties."""
        longest = max(row.length for row in self.rows)
        padded = [row.tokens[: row.length] + [0] * (longest - row.length) for row in self.rows]
        return History(
            self.tensor(padded).view(self.num_rows, longest),
            self.tensor(self.lengths),
            self.tensor([row.prompt_length for row in self.rows]),
        )


C = TypeVar("C", bound=Context)


def own_context(ctx: Context, kind: type[C]) -> C:
    """The context as a target's own kind. Raises ConfigError if it is of another kind of target."""
    if not isinstance(ctx, kind):
        raise ConfigError(
            "this context is of another kind of target: take the one that this target's new_context() made"
        )
    return ctx


class Target(ABC):
    """A causal LM that scores trees against KV slots and forgets what was not kept.

    Attributes:
        name: for reports.
        vocab_size: V of its logits.
        max_length: tokens a row may hold, prompt included.
        num_layers, hidden_size: for drafters that tap features.
        dtype: what is computed in. Logits, features and caches have it too, or are wider.
        device: of its logits and caches.
        eos_ids: tokens that end a text.
        folder: where it was loaded from, if that is known.
        supports_trees: False where a state cannot be rolled back; then only lone roots are allowed.
        supports_views: whether it can draft for itself through some of its rows' slots (``draft`` and ``watch``).
        supports_pages: whether its slots may lie in pages (``model.paged``), and a prompt be read in pieces (``read``).
        walks: whether ``forward`` takes how tokens are drawn, and may find out at once what is kept.
    """

    name: str
    vocab_size: int
    max_length: int
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    eos_ids: tuple[int, ...]
    folder: Path | None = None
    supports_trees: bool = True
    supports_views: bool = False
    supports_pages: bool = False
    walks: bool = False

    @property
    def quantized(self) -> str | None:
        """How its matrices are quantised; None: not at all."""
        return None

    @property
    def runtime(self) -> str:
        """What runs its layers: ``torch``, or the CPU ``kernel`` (``run.kernel.build``)."""
        return "torch"

    @property
    def runs_as(self) -> str:
        """What computes its matrices: see ``Linear.runs_as``."""
        return "transformers"

    @property
    @abstractmethod
    def num_weight_bytes(self) -> int:
        """Bytes of weights read by one forward of one token (for bandwidth figures)."""

    @property
    @abstractmethod
    def embedding(self) -> Embedding:
        """(V, H) rows of the input tokens: nets read them too."""

    @property
    @abstractmethod
    def head(self) -> Linear:
        """The LM head: (R, H) after the final norm -> (R, V)."""

    @abstractmethod
    def new_context(self, features: FeatureSpec = NO_FEATURES) -> Context:
        """An empty context, whose forwards give out these hidden states."""

    @abstractmethod
    def prefill(self, ctx: Context, prompt_ids: Sequence[int]) -> Tensor | None:
        """Add a row at the end: cache all of the prompt but its last token, which becomes pending.

        Returns:
            (1, T - 1, F) features of the cached tokens where the context asks for them, else None.
        """

    def read(self, ctx: Context, row: Row, start: int, stop: int) -> Tensor | None:
        """Read the tokens from ``start`` to before ``stop`` of a row that is to come behind those of the context.

        What lies before them must have been read into the same slots.

        Returns:
            (1, stop - start, F) features where the context asks for them, else None.

        Raises:
            UnsupportedError: ``supports_pages`` is False.
        """
        raise UnsupportedError(
            f"{self.name} runs in transformers, which reads prompts as a whole and keeps slots of its own: leave "
            f"kv_memory out, or load it with engine='lean' if it is of a family that the lean decoder knows"
        )

    @abstractmethod
    def forward(self, ctx: Context, tree: DraftTree, walk: Walk | None = None) -> TargetOutput:
        """Score every node. Writes the nodes' slots, commits nothing.

        Args:
            walk: how the tokens after the trees are drawn; of targets that ``walks`` alone. They may then descend in
                the trees at once, put what is kept into its slots, and say so (``TargetOutput.accepted``). That changes
                nothing that was committed before.
        """

    @abstractmethod
    def score(self, ids: Tensor, features: FeatureSpec = NO_FEATURES) -> TargetOutput:
        """Whole texts in one causal forward, for training: no context, no cache.

        Args:
            ids: (B, T) int64, padding (any token) at the ends of rows.
            features: which hidden states to return.

        Returns:
            logits (B, T, V) and features (B, T, F).
        """

    @abstractmethod
    def commit(self, ctx: Context, tree: DraftTree, accepted: Accepted) -> None:
        """Make the kept paths part of the rows' caches. ``ctx.rows`` still holds the lengths before the step."""

    @abstractmethod
    def remove(self, ctx: Context, row: int) -> None:
        """Drop a row; the last row takes its place."""

    def draft(self, ctx: Context, view: View, asked: Asked) -> Drafted:
        """Grow the trees that are asked for by forwards of its own that look at the committed slots of a view alone.

        Only slots behind the committed ones are written: those of the trees, which ``forward`` writes anew.

        Raises:
            UnsupportedError: ``supports_views`` is False.
        """
        raise self._no_views()

    def watch(self, ctx: Context, row: int, start: int) -> Tensor:
        """How much a row's committed tokens from ``start`` on look at each slot before them: see ``Runner.watch``.

        Raises:
            UnsupportedError: ``supports_views`` is False.
        """
        raise self._no_views()

    def _no_views(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} runs in transformers, which cannot look at some of its slots alone: load it with "
            f"engine='lean' if it is of a family that the lean decoder knows, or draft in another way"
        )

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raise PromptError where the prompt cannot be decoded."""
        if not prompt_ids:
            raise PromptError("the prompt is empty: give at least one token (to write freely, the BOS token alone)")
        if len(prompt_ids) >= self.max_length:
            raise PromptError(
                f"the prompt has {len(prompt_ids)} tokens, and {self.name} has room for {self.max_length} with at "
                f"least one new token: shorten it"
            )
        worst = max(prompt_ids, key=lambda token: abs(token + 0.5 - self.vocab_size / 2))
        if not 0 <= worst < self.vocab_size:
            raise PromptError(
                f"token id {worst} is outside the vocabulary of {self.vocab_size} of {self.name}: "
                f"was the prompt encoded with another tokenizer?"
            )
