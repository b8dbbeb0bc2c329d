"""Keyed noise: Gumbel numbers that are a hash of (seed, absolute position, token id).

There is no generator state, so the noise of a position is the same for the target, the drafter, any batch and any
device. ``sampling`` explains its use.

Shape suffixes: B rows, N nodes, D positions, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from draftwing.torch_utils import on_device

if TYPE_CHECKING:
    from draftwing.tree import Accepted, DraftTree


_GOLDEN, _MIX1, _MIX2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ALL = 2**64 - 1
DRAFT, ACCEPT, TARGET = 1, 2, 0  # streams: noise for different purposes is independent


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Shift logically; PyTorch's shift is arithmetic."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele et al. 2014): integer arithmetic, equal on every device."""
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_MIX1)  # in place: this runs over the whole vocabulary
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_MIX2)
    return _shift_right(x, 31).bitwise_xor_(x)


def _mix_int(x: int) -> int:
    """Do the same for one number on the host, since a dozen kernels would take far longer."""
    x &= _ALL
    x = (x ^ x >> 30) * _MIX1 & _ALL
    x = (x ^ x >> 27) * _MIX2 & _ALL
    return _wrap(x ^ x >> 31)


def _wrap(x: int) -> int:
    """Wrap to int64."""
    return (x + 2**63 & _ALL) - 2**63


def hash_bits(seed: int, counters: Sequence[int | Tensor], ids: Tensor) -> Tensor:
    """Return 64 random bits for each id: int64 of the shape that ``counters`` and ``ids`` broadcast to.

    Each counter (an int or an int64 tensor) is absorbed in turn, so that (1, 2) and (2, 1) differ.
    """
    return _mix(hash_key(seed, counters) + (ids + 1) * _GOLDEN)


def hash_key(seed: int, counters: Sequence[int | Tensor]) -> int | Tensor:
    """Return what ``hash_bits`` mixes with the ids: int64 of the shape that ``counters`` broadcast to."""
    key: int | Tensor = _mix_int(seed + _GOLDEN)
    for counter in counters:
        key = _wrap(key + _GOLDEN) if isinstance(key, int) else key + _GOLDEN
        if isinstance(counter, Tensor):
            key = _mix(_mix(counter * _MIX2 + _GOLDEN) ^ key)
        elif isinstance(key, Tensor):
            key = _mix(key ^ _mix_int(counter * _MIX2 + _GOLDEN))
        else:
            key = _mix_int(key ^ _mix_int(counter * _MIX2 + _GOLDEN))
    return key


def uniform(bits: Tensor) -> Tensor:
    """Return float64 in the open interval (0, 1) from 64 bits, on a grid of 2^-52."""
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def gumbel(bits: Tensor) -> Tensor:
    """Return standard Gumbel noise in float32; float64 inside, so that a last-bit difference of ``log`` rounds away."""
    return uniform(bits).log_().neg_().log_().neg_().float()


# Temperatures, top-k (0 for all tokens), top-p and min-p of the rows.
Filters = tuple[Sequence[float], Sequence[int], Sequence[float], Sequence[float]]


class AcceptArgs(NamedTuple):
    """How the target draws the tokens after a batch of trees, for a runner that applies ``accept.match`` itself.

    Attributes:
        noise: the handle of a ``KeyedNoise``.
        seeds, starts, filters: see ``KeyedNoise.match``.
    """

    noise: int
    seeds: Sequence[int]
    starts: Sequence[int]
    filters: Filters | None


class KeyedNoise:
    """Gumbel noise of a (seed, position) over the whole vocabulary.

    The drafter, the verification and the next step's verification read the same positions, so recent ones are cached on
    a CPU. A GPU computes all rows' noise at once, which is faster than one row from a cache.

    Attributes:
        handle: for the CPU kernel to read the same noise; None if it cannot.
    """

    handle: int | None = None

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", capacity: int = 256) -> None:
        self.vocab_size, self._device = vocab_size, torch.device(device)
        self._cache: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._capacity = capacity

    @cached_property
    def _ids(self) -> Tensor:
        return torch.arange(self.vocab_size, device=self._device)

    def at(self, seed: int, position: int) -> Tensor:
        """Return the noise (V,) float32 of a position."""
        key = (seed, position)
        noise = self._cache.get(key)
        if noise is None:
            noise = self._cache[key] = gumbel(hash_bits(seed, (TARGET, position), self._ids))
            if len(self._cache) > self._capacity:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return noise

    def block(self, seeds: Sequence[int], starts: Sequence[int], num_positions: int) -> Tensor:
        """Return the noise (B, D, V) of positions ``starts[b] .. starts[b] + num_positions - 1`` of every row."""
        pairs = [(seed, start + i) for seed, start in zip(seeds, starts, strict=True) for i in range(num_positions)]
        if self._device.type == "cpu":
            noise = torch.stack([self.at(seed, position) for seed, position in pairs])
        else:
            keys = [cast(int, hash_key(seed, (TARGET, position))) for seed, position in pairs]
            noise = gumbel(_mix(on_device(keys, self._device)[:, None] + (self._ids + 1) * _GOLDEN))
        return noise.view(len(seeds), num_positions, -1)

    def match(
        self,
        tree: DraftTree,
        scores: Tensor,
        seeds: Sequence[int],
        starts: Sequence[int],
        filters: Filters | None = None,
    ) -> Accepted | None:
        """Return the nodes that ``accept.match`` accepts, if native code can find them; else None.

        Args:
            scores: (B, N, V) on the host; logits if ``filters`` are given.
            seeds: (B,), -1 for greedy rows.
            starts: (B,) absolute position of the token after the root.
            filters: make scores from logits, on the accepted path alone.
        """
        return None
