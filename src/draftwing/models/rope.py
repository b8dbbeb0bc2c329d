"""Rotary position embeddings (RoFormer, 2104.09864), for every RoPE type of the lean decoder.

Every number is the one that transformers computes, bit for bit in float32: inverse frequencies, position times
frequency, cosine and sine in float32, times YaRN's attention factor, and only then rounded to the model's dtype.

Types: linear position interpolation (2306.15595), dynamic NTK and YaRN (2309.00071), llama3 (2407.21783).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.models.config import RopeConfig

_FIRST_ROWS = 1024  # rows of the first table

_COMPLEX = {
    torch.float32: torch.complex64,
    torch.bfloat16: torch.complex64,
    torch.float16: torch.complex64,
    torch.float64: torch.complex128,
}


def inverse_frequencies(config: RopeConfig, seq_len: Tensor | None = None) -> Tensor:
    """Return the angle per position of each rotated pair, in radians: float32 (rotary_dim / 2,).

    For type dynamic, ``seq_len`` is a 0-dimensional int64 tensor: the length in tokens to stretch to. Not an int,
    because transformers passes a tensor, whose arithmetic is float32 where Python's is float64.
    """
    dim, device = config.rotary_dim, torch.device("cpu") if seq_len is None else seq_len.device
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    base: Tensor | float = config.theta
    if config.type == "dynamic":
        limit = config.max_position_embeddings
        length = limit if seq_len is None else seq_len.clamp(min=limit)
        base = config.theta * (config.factor * length / limit - (config.factor - 1)) ** (dim / (dim - 2))
    wavelengths: Tensor = base**exponents  # in positions per radian
    if config.type == "yarn":
        return _yarn(config, wavelengths)
    frequencies = 1.0 / wavelengths
    if config.type == "proportional":
        frequencies[int(config.partial_rotary_factor * dim // 2) :] = 0
    if config.type in ("linear", "proportional"):
        return frequencies / config.factor
    if config.type == "llama3":
        return _llama3(config, frequencies)
    return frequencies


def attention_factor(config: RopeConfig) -> float:
    """Return the factor of cosine and sine: YaRN's temperature, otherwise 1.0."""
    if config.type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    # DeepSeek's two settings count only together; 0 means absent.
    if config.mscale and config.mscale_all_dim:
        return temperature(config.mscale) / temperature(config.mscale_all_dim)
    return temperature(1.0)


def _original_context(config: RopeConfig) -> int:
    return config.original_max_position_embeddings or config.max_position_embeddings


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Keep short waves, slow long ones by ``factor``, and blend the band between."""
    context, low, high = _original_context(config), config.low_freq_factor, config.high_freq_factor
    waves = 2 * math.pi / frequencies
    share = (context / waves - low) / (high - low or 1.0)  # Llama 4's bands have no width
    blend = (1 - share) * frequencies / config.factor + share * frequencies
    slowed = torch.where(waves > context / low, frequencies / config.factor, blend)
    return torch.where(waves < context / high, frequencies, slowed)


def _yarn(config: RopeConfig, wavelengths: Tensor) -> Tensor:
    """YaRN's "NTK by parts": a ramp over the dimensions from untouched (fast) to interpolated (slow)."""
    dim, context = config.rotary_dim, _original_context(config)

    def dimension(rotations: float) -> float:
        """The (real-valued) dimension whose wave turns this many times over the original context."""
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(config.theta))

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step, not a division by zero
    places = torch.arange(dim // 2, dtype=torch.float32, device=wavelengths.device)
    ramp = ((places - first) / (last - first)).clamp(0, 1)
    # 1 - (1 - ramp) is not ramp in float32; transformers rounds this way.
    keep = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


class Rotary:
    """Complex rotation factors ``a * exp(i * position * frequency)``.

    For all types but dynamic the factors of a position are a row of a table, which grows on demand. For type dynamic
    the frequencies also depend on the length of the sequence. Each token has its own,

        seq_len(t) = max(t + 1, prompt_length, max_position_embeddings),

    which is the result of transformers' token-by-token ``generate`` for a single prompt, but does not depend on how
    tokens are grouped into forwards: a token verified in a block of eight is rotated as if it had come alone.

    Layers may differ: each reads a range of the factors.

    Args:
        dtype: float32, bfloat16, float16 (factors are complex64) or float64 (complex128). Cosine and sine are computed
            in float32 and rounded to this dtype, as transformers does.
        device: of positions and factors.
        local: the settings of layers with a window, if they have their own; their factors follow the others.
        query_scale: (beta, length, first): the last factor is then 1 + beta * log(1 + floor((position + first) /
            length)), by which queries are multiplied (Llama 4).
    """

    def __init__(
        self,
        config: RopeConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        local: RopeConfig | None = None,
        query_scale: tuple[float, int, int] | None = None,
    ) -> None:
        if dtype not in _COMPLEX:
            names = ", ".join(map(str, _COMPLEX))
            raise ConfigError(f"Rotary: dtype must be one of {names}, found {dtype}. Load the model in one of these.")
        self._configs = (config,) if local is None else (config, local)
        self._query_scale = query_scale
        self.position_only = all(each.position_only for each in self._configs)  # see ``RopeConfig.position_only``
        self._max_positions = config.max_position_embeddings
        self._dtype, self._complex_dtype = dtype, _COMPLEX[dtype]
        self._device = torch.device(device)
        # Computed on the CPU and moved, as in transformers, so that every device rotates by the same frequencies.
        parts = [inverse_frequencies(each) for each in self._configs]
        factors = [
            torch.full_like(part, attention_factor(each)) for part, each in zip(parts, self._configs, strict=True)
        ]
        self._inv_freq, self._attention_factors = torch.cat(parts).to(self._device), torch.cat(factors).to(self._device)
        width = len(self._inv_freq) + (query_scale is not None)
        self._table = torch.empty(0, width, dtype=self._complex_dtype, device=self._device)
        self._stretched: dict[int, Tensor] = {}
        self.reserve(min(_FIRST_ROWS, self._max_positions))

    # Tensors made in inference mode could not be used in training later, and these outlive the mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def reserve(self, length: int) -> None:
        """Extend the table to positions 0 to ``length - 1``; no effect on type dynamic."""
        rows = self._table.shape[0]
        if not self.position_only or length <= rows:
            return
        # To a power of two, so that a sequence that grows by one token rarely extends it.
        fresh = torch.arange(rows, 1 << (length - 1).bit_length(), device=self._device)
        self._table = torch.cat((self._table, self._factors(fresh, self._inv_freq)))

    def table(self, length: int) -> Tensor:
        """Factors of positions 0 to at least ``length - 1``, (positions, factors); not for type dynamic."""
        self.reserve(length)
        return self._table

    @torch.no_grad()
    def cis(self, positions: Tensor, prompt_lengths: Tensor | None = None, *, upto: int | None = None) -> Tensor:
        """Return cosine and sine times the attention factor, complex (..., factors), of ``positions`` (...).

        Args:
            positions: int64, 0 or more, on this object's device.
            prompt_lengths: int64, broadcastable to ``positions``: tokens of each token's prompt, for type dynamic;
                None to ignore prompts.
            upto: a number above every position, if known. Without it, or for type dynamic, the largest position is read
                back from the device, which waits for all queued work.
        """
        if not self.position_only and positions.numel():
            return self._factors(positions, self._dynamic_frequencies(positions, prompt_lengths))
        if positions.numel():
            self.reserve(int(positions.max()) + 1 if upto is None else upto)
        rows = self._table.index_select(0, positions.reshape(-1))
        return rows.view(*positions.shape, self._table.shape[1])

    def _dynamic_frequencies(self, positions: Tensor, prompt_lengths: Tensor | None) -> Tensor:
        """float32 (..., factors): inverse frequencies of each token."""
        lengths = positions + 1
        if prompt_lengths is not None:
            lengths = torch.maximum(lengths, prompt_lengths.expand_as(lengths))
        lengths = lengths.clamp(min=self._max_positions)
        # One length at a time, as transformers does: a vectorised power on the CPU may round differently in its body
        # and its tail, so that a token's angles would depend on its neighbours.
        distinct, place = torch.unique(lengths, return_inverse=True)
        return torch.stack([self._frequencies_at(int(length)) for length in distinct.tolist()])[place]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _frequencies_at(self, seq_len: int) -> Tensor:
        if seq_len <= self._max_positions:
            return self._inv_freq
        if seq_len not in self._stretched:
            length = torch.tensor(seq_len, device=self._device)
            parts = torch.split(self._inv_freq, [each.rotary_dim // 2 for each in self._configs])
            self._stretched[seq_len] = torch.cat(
                [
                    part if each.position_only else inverse_frequencies(each, length)
                    for part, each in zip(parts, self._configs, strict=True)
                ]
            )
        return self._stretched[seq_len]

    def _factors(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """Complex factors of float32 angles, rounded through the model's dtype."""
        angles = positions.unsqueeze(-1).float() * frequencies
        parts = ((part * self._attention_factors).to(self._dtype) for part in (angles.cos(), angles.sin()))
        factors = torch.complex(*(part.to(self._complex_dtype.to_real()) for part in parts))
        if self._query_scale is None:
            return factors
        beta, length, first = self._query_scale
        scale = 1 + beta * torch.log(1 + torch.floor((positions + first) / length))
        return torch.cat([factors, scale.to(factors.dtype)[..., None]], -1)
