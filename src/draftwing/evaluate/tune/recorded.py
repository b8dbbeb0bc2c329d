"""Texts that a target wrote, with its keys and values: a batch on which any set of its layers is tried in one go.

A draft from position i reads the target's own keys and values before i, and those of its own chain behind. All
positions are drafted at once, each token of the chain being the text's: that is the draft's own as long as it is right,
and what comes after its first mistake does not count. So what is found is what greedy decoding would accept, exactly.

Shape suffixes: B rows, T tokens, C entries of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.model.lean import LeanTarget
from draftwing.model.subnet import Parts, SubNet
from draftwing.nets.unroll import UnrolledAttention

__all__ = ["Recorded", "Text"]

MOST_ENTRIES = 512  # positions of all texts together that a set is tried at


@dataclass(frozen=True)
class Text:
    """A prompt and what the target wrote after it, greedily.

    Attributes:
        ids: of both; ``prompt``: how many of them are the prompt's.
    """

    ids: tuple[int, ...]
    prompt: int

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"ids": list(self.ids), "prompt": self.prompt}

    @classmethod
    def from_dict(cls, values: Any) -> Text:
        """What ``to_dict`` gave. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(tuple(map(int, values["ids"])), int(values["prompt"]))


class Recorded:
    """See above.

    Args:
        target: with plain weights (``prepack=False``).
        texts: what it wrote. Sliding windows are not looked at: what lies beyond the narrowest one is cut off.
        depth: of the chains that are tried.

    Raises:
        ConfigError: no text has ``depth`` + 1 written tokens.
    """

    @torch.inference_mode()
    def __init__(self, target: LeanTarget, texts: Sequence[Text], depth: int) -> None:
        net, rows = target.net, len(texts)
        room = min([window for window in net.shape.windows if window is not None], default=target.max_length)
        lengths = [min(len(text.ids), room) for text in texts]
        longest = max(lengths, default=0)
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        starts = torch.arange(longest)  # the last token that is committed before each draft
        valid = torch.zeros(rows, longest, dtype=torch.bool)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            ids[row, :length] = torch.tensor(text.ids[:length])
            valid[row] = (starts >= max(text.prompt - 2, 0)) & (starts + depth + 1 < length)
        entries = valid.any(0).nonzero()[:, 0]
        if not len(entries):
            raise ConfigError(
                f"the recorded texts are too short: chains of {depth} need as many written tokens and one more, within "
                f"{room} tokens: let the target write more"
            )
        entries = entries[:: -(-rows * len(entries) // MOST_ENTRIES)]
        self._net, self._depth, self._longest, self._rows = net, depth, longest, rows
        self._ids, self._entries = ids.to(target.device), entries.to(target.device)
        self._valid = valid[:, entries].to(target.device)
        shape = net.shape
        self._attend = UnrolledAttention(rows, longest, shape.num_layers, shape.head_dim**-0.5)
        self._attend.cis = self._cis(torch.arange(longest, device=target.device))
        net.forward(self._ids.reshape(-1), None, self._attend)

    def _cis(self, places: Tensor) -> Tensor:
        """(B * C, 1, rotary_dim / 2)"""
        positions = places.repeat(self._rows)
        found = self._net.rotary.cis(positions, torch.full_like(positions, self._longest), upto=self._longest)
        return found.view(len(positions), 1, -1)

    @torch.inference_mode()
    def accepted(self, parts: Parts) -> tuple[float, ...]:
        """At which share of the positions the first token of a chain is accepted, the first two, ... all ``depth``."""
        net, attend, found = SubNet(self._net, parts), self._attend.again(), []
        attend.choose(self._entries)
        right, count = self._valid, int(self._valid.sum())
        for step in range(1, self._depth + 1):
            places = self._entries + step
            attend.cis = self._cis(places)
            read, _ = net.forward(self._ids[:, places].reshape(-1), None, attend)
            best = net.logits(read).argmax(-1).view(self._rows, -1)
            right = right & (best == self._ids[:, places + 1])
            found.append(int(right.sum()) / count)
        return tuple(found)
