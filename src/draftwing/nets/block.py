"""What nets have in common that guess several tokens in one pass: Medusa, Hydra, DFlash, DSpark.

An entry pairs the feature at position i with the token after it, as in EAGLE. From the last entry, whose token is
pending, one pass opens a *block*: what is known of each of the next K tokens. A tree then grows without another pass:
level k takes its law from the block, the same law for all nodes of the level, or one that a small step (``guess``)
makes of it and of the tokens on a node's path.

Shape suffixes: B rows, T tokens, C entries that blocks start from, W nodes of a level, R = B * C, K levels, H hidden,
V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.model.attention import Attend
from draftwing.model.linear import Linear
from draftwing.nets.base import DraftNet

__all__ = ["BlockNet", "Guess", "check_one_tap"]


class Guess(NamedTuple):
    """What is known of the tokens after the nodes of a level.

    Attributes:
        logits: (B, W, V) over the target's tokens, or (B, 1, V) where all nodes of the level have one law.
        carried: (B, W, ...) what the nodes' children need to know of them, or None.
        sure: (B, W) how far that law can be trusted, in (0, 1], or None.
    """

    logits: Tensor
    carried: Tensor | None = None
    sure: Tensor | None = None


class BlockNet(DraftNet):
    """A net that guesses ``num_levels`` tokens in one pass.

    Attributes:
        num_masks: places of unknown tokens that a second pass reads after the pending one, in the same slots as the
            entries; 0: the last entry's state is all that a block needs.
        share: of the entries of a text from which training starts blocks.
    """

    num_masks: int = 0
    share: float = 1.0

    @property
    @abstractmethod
    def num_levels(self) -> int:
        """K."""

    def start_from(self, target_head: Linear) -> Self:
        """Set a new net's weights by the target's LM head; as it stands, they stay random."""
        return self

    @property
    def mask_id(self) -> int:
        """Stands for an unknown token where ids are read."""
        vocab_size: int = self.config.vocab_size
        return vocab_size

    @property
    def is_traceable(self) -> bool:
        """See ``DraftNet``: the CPU kernel grows trees by a pass for each level."""
        return False

    def forward(self, ids: Any, states: Any, attend: Attend) -> tuple[Any, Any]:
        """See ``DraftNet``: of a net without slots, each entry's state."""
        return states, states

    # --- drafting --------------------------------------------------------------------------------------------------

    def open(self, out: Tensor, depth: int) -> Tensor:
        """The block of every row, from what the pass gave out; only the first ``depth`` levels will be asked for.

        Args:
            out: (B, 1, H) of the last entry, or (B, 1 + num_masks, H) of the pending token and the masks.
        """
        return out

    @abstractmethod
    def guess(self, level: int, block: Tensor, tokens: Tensor, carried: Tensor | None) -> Guess:
        """The law of the tokens after the nodes of a level.

        Args:
            level: from 0, below the root.
            block: from ``open``.
            tokens: (B, W) of the nodes; those that are unused hold any token.
            carried: (B, W, ...) of each node's parent, None for the root.
        """

    # --- training --------------------------------------------------------------------------------------------------

    @abstractmethod
    def levels(
        self, ids: Tensor, features: Tensor, entries: Tensor, num_levels: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What each level's head reads for all of ``entries`` (C,) of each row, with the text's own tokens as drafted.

        Level k of entry i guesses the token at i + 2 + k.

        Args:
            ids: (B, T), padded so far that every block lies in it.
            features: (B, T, F) the target's, of the same tokens.

        Yields:
            (R, H) and the head's matrix (V_draft, H).
        """

    @abstractmethod
    def level_logits(self, level: int, read: Tensor) -> Tensor:
        """(R, H) of ``levels`` -> (R, V) over the target's tokens."""

    def sureness(self, read: Tensor) -> Tensor | None:
        """(R, H) of ``levels`` -> (R,) log odds of 1 - TV(p, q), for nets that learn to say it."""
        return None


def check_one_tap(taps: tuple[int, ...], what: str) -> None:
    """Raise ConfigError where a net that reads one hidden state is told to read several."""
    if len(taps) != 1:
        raise ConfigError(f"{what} reads one hidden state of the target, found taps {taps}: give the last one alone")
