"""The running rows as targets and drafters see them, and the result of one target forward.

Shape suffixes: B rows, N nodes, V vocabulary, F features (all taps concatenated).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwing.sampling import History
from draftwing.torch_utils import on_device
from draftwing.tree import Accepted, DraftTree


@dataclass(frozen=True)
class FeatureSpec:
    """Hidden states that a drafter reads, concatenated in this order.

    ``taps`` are indices into transformers' ``hidden_states``: tap i is the input of layer i, tap ``num_layers`` the
    output of the final norm.
    """

    taps: tuple[int, ...] = ()


NO_FEATURES = FeatureSpec()


@dataclass(frozen=True)
class TargetOutput:
    """One forward over a batch of trees."""

    logits: Tensor  # (B, N, V) of the token after each node
    features: Tensor | None = None  # (B, N, F), or None if no taps were requested
    tree: DraftTree | None = None  # the trees, with paths that the forward has computed; None if unchanged
    is_kept: bool = True  # True if logits and features stay valid after the next forward
    # the accepted nodes, if the forward has applied ``accept.match``: they are committed, and ``features`` are those of
    # the accepted nodes in path order
    accepted: Accepted | None = None
    seconds: float = 0.0  # duration, if the forward was part of the call that drafted

    def features_on(self, tree: DraftTree, path: Tensor) -> Tensor | None:
        """(B, at least P, F) features of the nodes on ``path`` (B, P) through ``tree``; undefined past a row's end."""
        features = self.features
        if features is None or self.accepted is not None or (tree.is_line and self.is_kept):
            return features
        if len(path) == 1:
            return features.index_select(1, path[0].clamp(min=0))
        return features.gather(1, path.clamp(min=0)[:, :, None].expand(-1, -1, features.shape[2]))


@dataclass
class Row:
    """One sequence: its tokens on the host. ``tokens[length]`` is pending: emitted, its keys not yet cached.

    ``references`` are token sequences that the request expects to be repeated, for drafters. ``drafts`` names the
    drafters that the request chose, of several; None for all. ``resumed`` of its slots were written before the row was
    admitted to a drafter.
    """

    tokens: list[int]
    length: int
    prompt_length: int
    references: Sequence[Sequence[int]] = ()
    drafts: Sequence[str] | None = None
    resumed: int = 0

    def takes(self, name: str) -> bool:
        """True if a drafter of this name may propose for the row."""
        return self.drafts is None or name in self.drafts


@dataclass
class Context:
    """The running rows: row ``i`` of every tensor is ``rows[i]``. Targets add their caches in subclasses.

    ``features`` are the hidden states that forwards return.
    """

    device: torch.device
    rows: list[Row] = field(default_factory=list)
    features: FeatureSpec = NO_FEATURES

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return [row.length for row in self.rows]

    def tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """int64 on the context's device."""
        return on_device(values, self.device)

    def pending(self) -> Tensor:
        """(B,) the tokens at the roots of the next trees."""
        return self.tensor([row.tokens[row.length] for row in self.rows])

    def roots(self) -> DraftTree:
        """Lone roots: autoregressive decoding."""
        return DraftTree.root(self.pending())

    def history(self) -> History:
        """The committed tokens as padded tensors, for penalties."""
        longest = max(self.lengths)
        padded = [row.tokens[: row.length] + [0] * (longest - row.length) for row in self.rows]
        prompts = self.tensor([row.prompt_length for row in self.rows])
        return History(self.tensor(padded).view(self.num_rows, longest), self.tensor(self.lengths), prompts)
