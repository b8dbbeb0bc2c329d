"""One noise per position: Gumbel numbers that are a hash of (seed, absolute position, token id).

There is no generator and no state, so whoever asks for the noise of a position gets the same one: the target, the
drafter, any batch and any device. See ``sampling`` for what it is for.

Shape suffixes: B rows, N nodes, D positions, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftwing.tree import Accepted, DraftTree

__all__ = ["ACCEPT", "DRAFT", "TARGET", "Filters", "KeyedNoise", "Walk", "gumbel", "hash_bits", "uniform"]

_GOLDEN, _MIX1, _MIX2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ALL = 2**64 - 1
DRAFT, ACCEPT, TARGET = 1, 2, 0  # streams: noise drawn for one purpose never meets another's


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014): integer arithmetic alone, so alike on every device."""
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_MIX1)  # in place: this runs over the whole vocabulary
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_MIX2)
    return _shift_right(x, 31).bitwise_xor_(x)


def _mix_int(x: int) -> int:
    """``_mix`` of one number on the host: a dozen kernels on one number each would take far longer."""
    x &= _ALL
    x = (x ^ x >> 30) * _MIX1 & _ALL
    x = (x ^ x >> 27) * _MIX2 & _ALL
    return _wrap(x ^ x >> 31)


def _wrap(x: int) -> int:
    """``x`` as an int64 holds it."""
    return (x + 2**63 & _ALL) - 2**63


def hash_bits(seed: int, counters: Sequence[int | Tensor], ids: Tensor) -> Tensor:
    """64 random bits for each id: int64 of the shape that ``counters`` and ``ids`` broadcast to.

    Each counter (an int or an int64 tensor) is absorbed in turn, so that (1, 2) and (2, 1) differ.
    """
    key: int | Tensor = _mix_int(seed + _GOLDEN)
    for counter in counters:
        key = _wrap(key + _GOLDEN) if isinstance(key, int) else key + _GOLDEN
        if isinstance(counter, Tensor):
            key = _mix(_mix(counter * _MIX2 + _GOLDEN) ^ key)
        elif isinstance(key, Tensor):
            key = _mix(key ^ _mix_int(counter * _MIX2 + _GOLDEN))
        else:
            key = _mix_int(key ^ _mix_int(counter * _MIX2 + _GOLDEN))
    return _mix(key + (ids + 1) * _GOLDEN)


def uniform(bits: Tensor) -> Tensor:
    """float64 in the open interval (0, 1) from 64 bits, on a grid of 2^-52."""
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise as float32; computed in float64, so that a last-bit difference of ``log`` rounds away."""
    return uniform(bits).log_().neg_().log_().neg_().float()


# Temperatures, top-k (0 for all tokens), top-p and min-p of the rows.
Filters = tuple[Sequence[float], Sequence[int], Sequence[float], Sequence[float]]


class Walk(NamedTuple):
    """How the tokens after a batch of trees are drawn: what ``KeyedNoise.walk`` is given, for whoever runs the trees.

    Attributes:
        noise: a handle, see ``KeyedNoise``.
        seeds, starts, filters: see ``KeyedNoise.walk``.
    """

    noise: int
    seeds: Sequence[int]
    starts: Sequence[int]
    filters: Filters | None


class KeyedNoise:
    """Gumbel noise of a (seed, position) over the whole vocabulary, each computed once while it is near.

    The drafter, the verification and the next step's verification ask for the same positions; a bounded
    cache serves them, the least recently used going first. It holds no state that could change a result.

    Attributes:
        handle: by which the CPU kernel reads the same noise; None: it cannot.
    """

    handle: int | None = None

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", capacity: int = 256) -> None:
        self.vocab_size, self._device = vocab_size, device
        self._cache: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._capacity = capacity

    @cached_property
    def _ids(self) -> Tensor:
        return torch.arange(self.vocab_size, device=self._device)

    def at(self, seed: int, position: int) -> Tensor:
        """(V,) float32."""
        key = (seed, position)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = gumbel(hash_bits(seed, (TARGET, position), self._ids))
            if len(self._cache) > self._capacity:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return found

    def block(self, seeds: Sequence[int], starts: Sequence[int], num_positions: int) -> Tensor:
        """(B, D, V): positions ``starts[b] .. starts[b] + num_positions - 1`` of every row."""
        keys = [(seed, start + i) for seed, start in zip(seeds, starts, strict=True) for i in range(num_positions)]
        rows = [self.at(seed, position) for seed, position in keys]
        return torch.stack(rows).view(len(seeds), num_positions, -1)

    def walk(
        self,
        tree: DraftTree,
        scores: Tensor,
        seeds: Sequence[int],
        starts: Sequence[int],
        filters: Filters | None = None,
    ) -> Accepted | None:
        """What ``accept.match`` keeps, where something faster than Python finds it; else None.

        Args:
            tree: the batch of trees.
            scores: (B, N, V) on the host; with ``filters`` the logits that scores are made of.
            seeds: of the rows, -1 for greedy ones.
            starts: for each row the absolute position of the token after the root.
            filters: what makes scores of logits, on the kept path alone.
        """
        return None
