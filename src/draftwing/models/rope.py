"""Rotary position embeddings: the angles, for every RoPE type that the lean decoder knows.

Every number here is the one that transformers computes, bit for bit in float32: inverse frequencies in float32,
position times frequency in float32, cosine and sine in float32, times YaRN's attention factor, and only then
rounded to the model's dtype. A lean decoder that rotates differently by one ulp would still be a good decoder,
but it could not be tested for equality against the reference.

Papers: RoPE, Su et al. 2021 (arXiv:2104.09864); linear position interpolation, Chen et al. 2023
(arXiv:2306.15595); dynamic NTK and YaRN, Peng et al. 2023 (arXiv:2309.00071); the "llama3" frequency bands,
Llama Team 2024 (arXiv:2407.21783).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.models.config import RopeConfig

# Rows of the first table; it doubles from here. Small, because a test or a chat needs no more.
_FIRST_ROWS = 1024

_COMPLEX = {
    torch.float32: torch.complex64,
    torch.bfloat16: torch.complex64,
    torch.float16: torch.complex64,
    torch.float64: torch.complex128,
}


def inverse_frequencies(config: RopeConfig, seq_len: Tensor | None = None) -> Tensor:
    """The angle per position of each rotated pair, in radians.

    Args:
        config: the RoPE settings.
        seq_len: for type dynamic only, a 0-dimensional int64 tensor: the sequence length in tokens to stretch
            to (one at most the context changes nothing). A tensor and not an int, because transformers passes a
            tensor, whose arithmetic is float32 where Python's is float64. The result is on its device.

    Returns:
        float32, shape (rotary_dim / 2,); on the CPU where seq_len is None.
    """
    dim = config.rotary_dim
    device = seq_len.device if seq_len is not None else torch.device("cpu")
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    base = _ntk_base(config, seq_len) if config.type == "dynamic" else config.theta
    wavelengths: Tensor = base**exponents  # in positions per radian
    if config.type == "yarn":
        return _yarn(config, wavelengths)
    frequencies = 1.0 / wavelengths
    if config.type == "linear":
        return frequencies / config.factor
    if config.type == "llama3":
        return _llama3(config, frequencies)
    return frequencies


def attention_factor(config: RopeConfig) -> float:
    """The number that cosine and sine are multiplied with: YaRN's temperature, else 1.0."""
    if config.type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    # DeepSeek's two knobs count only together, and a zero counts as absent.
    if config.mscale and config.mscale_all_dim:
        return temperature(config.mscale) / temperature(config.mscale_all_dim)
    return temperature(1.0)


def _ntk_base(config: RopeConfig, seq_len: Tensor | None) -> Tensor | float:
    """The base that stretches theta's longest wave to ``seq_len`` tokens and leaves its shortest alone."""
    dim, limit = config.rotary_dim, config.max_position_embeddings
    length = limit if seq_len is None else seq_len.clamp(min=limit)
    base: Tensor | float = config.theta * (config.factor * length / limit - (config.factor - 1)) ** (dim / (dim - 2))
    return base


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Short waves keep their frequency, long ones are slowed by ``factor``, the band between is a blend."""
    context, low, high = config.original_context, config.low_freq_factor, config.high_freq_factor
    waves = 2 * math.pi / frequencies
    share = (context / waves - low) / (high - low)
    blend = (1 - share) * frequencies / config.factor + share * frequencies
    slowed = torch.where(waves > context / low, frequencies / config.factor, blend)
    return torch.where(waves < context / high, frequencies, slowed)


def _yarn(config: RopeConfig, wavelengths: Tensor) -> Tensor:
    """YaRN's "NTK by parts": a ramp over the dimensions from untouched (fast) to interpolated (slow)."""
    dim, context = config.rotary_dim, config.original_context

    def dimension_of(rotations: float) -> float:
        # The (real-valued) dimension whose wave turns this many times over the original context.
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(config.theta))

    first, last = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step, not a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=wavelengths.device) - first) / (last - first)).clamp(
        0, 1
    )
    # Written with 1 - (1 - ramp), which in float32 is not ramp, because the reference rounds so.
    keep = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


class Rotary:
    """Complex rotation factors ``a * exp(i * position * frequency)`` for a model's positions.

    For all types but dynamic the factors of a position are a row of a table, which grows on demand. Type dynamic
    has no such table: its frequencies depend on the length of the text as well, and transformers takes for that
    the longest length so far of whatever forward a token happens to be in. Here each token has its own length,

        seq_len(t) = max(t + 1, prompt_length, max_position_embeddings),

    which is what transformers' plain token-by-token ``generate`` ends up with for a single prompt, but depends on
    (prompt length, position) only and not on how tokens are grouped into forwards. That is what keeps speculation
    lossless: a token verified in a block of eight is rotated exactly as if it had come alone.

    Args:
        config: the RoPE settings.
        dtype: the model's dtype: float32, bfloat16, float16 (factors are complex64) or float64 (complex128).
            Cosine and sine are computed in float32 and rounded to this dtype, as transformers does.
        device: where positions are and factors go.

    Raises:
        ConfigError: for any other dtype.
    """

    def __init__(
        self, config: RopeConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        if dtype not in _COMPLEX:
            names = ", ".join(str(known) for known in _COMPLEX)
            raise ConfigError(f"Rotary: dtype must be one of {names}, found {dtype}. Load the model in one of these.")
        self.config = config
        self.dtype = dtype
        self.complex_dtype = _COMPLEX[dtype]
        self.device = torch.device(device)
        self.attention_factor = attention_factor(config)
        # Computed on the CPU and moved, as in transformers, so that every device rotates by the same frequencies.
        self.inv_freq = inverse_frequencies(config).to(self.device)
        self._table = torch.empty(0, config.rotary_dim // 2, dtype=self.complex_dtype, device=self.device)
        self._stretched: dict[int, Tensor] = {}
        self.reserve(min(_FIRST_ROWS, config.max_position_embeddings))

    # Rows made under inference_mode could not serve training later, and they outlive the mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def reserve(self, length: int) -> None:
        """Make the table hold positions 0 to ``length - 1``; nothing to do for type dynamic, or if it does."""
        rows = self._table.shape[0]
        if not self.config.position_only or length <= rows:
            return
        # To a power of two, so that a text growing by one token computes nothing most of the time.
        fresh = torch.arange(rows, 1 << (length - 1).bit_length(), device=self.device)
        self._table = torch.cat((self._table, self._factors(fresh, self.inv_freq)))

    def table(self, length: int) -> Tensor:
        """The factors of positions 0 to at least ``length - 1``, (positions, rotary_dim / 2); not for type dynamic."""
        self.reserve(length)
        return self._table

    @torch.no_grad()
    def cis(self, positions: Tensor, prompt_lengths: Tensor | None = None, *, upto: int | None = None) -> Tensor:
        """The rotation factors of tokens.

        Args:
            positions: int64, any shape (...), 0 or more, on this object's device.
            prompt_lengths: int64, broadcastable to ``positions``: the length in tokens of the prompt that each
                token's text began with. Only type dynamic looks at it; None there means no prompt counts.
            upto: a number above every position, if the caller knows one. Without it, or for type dynamic, the largest
                position is read back from the device, and an accelerator finishes all queued work first.

        Returns:
            complex64 or complex128 by dtype, shape (..., rotary_dim / 2): real part the cosine, imaginary the sine,
            both times the attention factor.

        Raises:
            IndexError: for a negative position, or on the CPU one not below ``upto`` (types other than dynamic).
        """
        if not self.config.position_only and positions.numel():
            return self._factors(positions, self._dynamic_frequencies(positions, prompt_lengths))
        if positions.numel():
            self.reserve(int(positions.max()) + 1 if upto is None else upto)
        rows = self._table.index_select(0, positions.reshape(-1))
        return rows.view(*positions.shape, self._table.shape[1])

    def _dynamic_frequencies(self, positions: Tensor, prompt_lengths: Tensor | None) -> Tensor:
        """float32 (..., rotary_dim / 2): each token's own inverse frequencies."""
        lengths = positions + 1
        if prompt_lengths is not None:
            lengths = torch.maximum(lengths, prompt_lengths.expand_as(lengths))
        lengths = lengths.clamp(min=self.config.max_position_embeddings)
        # A length at a time, as the reference computes it: a vectorised power on the CPU may round differently in
        # its body and its tail, and then a token's angles would depend on its neighbours after all.
        distinct, place = torch.unique(lengths, return_inverse=True)
        return torch.stack([self._frequencies_at(int(length)) for length in distinct.tolist()])[place]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _frequencies_at(self, seq_len: int) -> Tensor:
        if seq_len <= self.config.max_position_embeddings:
            return self.inv_freq
        if seq_len not in self._stretched:
            self._stretched[seq_len] = inverse_frequencies(self.config, torch.tensor(seq_len, device=self.device))
        return self._stretched[seq_len]

    def _factors(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """float32 angles to complex factors, rounded through the model's dtype."""
        angles = positions.unsqueeze(-1).float() * frequencies
        parts = ((part * self.attention_factor).to(self.dtype) for part in (angles.cos(), angles.sin()))
        return torch.complex(*(part.to(self.complex_dtype.to_real()) for part in parts))
