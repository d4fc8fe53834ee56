"""Rotary position embeddings (Su et al., 2021) with the scalings that Llama and Qwen checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvseek.core.model_config import ModelConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of tokens, float32 [tokens, D/2] each, one of each pair of channels; the attention factor is included."""


class RotaryEmbedding:
    """Cosines and sines of positions, in tables that grow on demand.

    longrope has two sets of frequencies. A prompt is rotated by the set for its length. A token that is generated is rotated by
    the set for the sequence that it ends, so its position decides. Keys in the cache stay as they are, as in transformers.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        sets, factor = frequency_sets(config)
        self._sets, self._short_reach = sets.to(device), config.short_reach
        self._factors = pair_factors(self._sets, factor)
        self._size = 0  # positions of each set in the tables, which lie behind each other
        self._cos = self._sin = torch.empty(0, config.head_dim // 2, device=device)

    def __call__(self, start: int, stop: int, length: int) -> Rotation:
        """Return the rotation of positions start .. stop - 1 of a prompt of `length` tokens."""
        self._grow(stop)
        first = self._first_row(length)
        return self._cos[first + start : first + stop], self._sin[first + start : first + stop]

    def at(self, positions: list[int]) -> Rotation:
        """Return the rotation of tokens that are generated at the given positions."""
        self._grow(max(positions) + 1)
        rows = [self._first_row(position + 1) + position for position in positions]
        index = torch.tensor(rows, device=self._cos.device)
        return self._cos.index_select(0, index), self._sin.index_select(0, index)

    def _first_row(self, length: int) -> int:
        return self._size if length > self._short_reach else 0

    def _grow(self, positions: int) -> None:
        if positions <= self._size:
            return
        self._size = max(1024, 1 << (positions - 1).bit_length())
        row_positions = torch.arange(self._size, device=self._sets.device).float()
        angles = torch.cat([torch.outer(row_positions, frequencies) for frequencies in self._sets])
        factors = self._factors.repeat_interleave(self._size, dim=0)
        self._cos, self._sin = angles.cos() * factors, angles.sin() * factors


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs of channels (i, i + D/2) of x [tokens, heads, D]; the result has the dtype of x."""
    cos, sin = (part[:, None].to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def pair_factors(frequencies: Tensor, factor: float) -> Tensor:
    """Return the factor on cosines and sines of each pair: 1 where the frequency is 0, as no such pair is rotated."""
    return torch.where(frequencies == 0, 1.0, factor)


def frequency_sets(config: ModelConfig) -> tuple[Tensor, float]:
    """Compute all frequencies that an engine needs, float32 [sets, D/2], and the factor on cosines and sines.

    The first set is for sequences of up to `config.short_reach` tokens. Only longrope has a second, for longer ones.
    """
    lengths = [1, config.short_reach + 1] if config.short_reach < config.max_position_embeddings else [1]
    sets = [frequencies(config, length) for length in lengths]
    return torch.stack([values for values, _ in sets]), sets[0][1]


def frequencies(config: ModelConfig, length: int = 1) -> tuple[Tensor, float]:
    """Compute the angle per position of each channel pair, float32 [D/2], and the factor on cosines and sines.

    `length` is the number of tokens of the sequence, which longrope's frequencies depend on. Pairs beyond those of rotary_dim
    have frequency 0.
    """
    values, factor = _rotated(config, length)
    return torch.nn.functional.pad(values, (0, config.head_dim // 2 - values.shape[0])), factor


def _rotated(config: ModelConfig, length: int) -> tuple[Tensor, float]:
    """Compute `frequencies` of the pairs that are rotated."""
    dim = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, dim, 2).float() / dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "longrope":
        divisors = scaling.long_factor if length > config.short_reach else scaling.short_factor
        return 1.0 / (torch.tensor(divisors) * config.rope_theta**exponents), _longrope_factor(scaling)
    return _yarn(plain, scaling, config)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale low frequencies, keep high ones, and blend between the two (Llama 3.1 model card)."""
    context = scaling.original_max_position_embeddings
    turns = context * plain / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / scaling.factor)


def _yarn(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> tuple[Tensor, float]:
    """Interpolate by the number of turns in the original context (YaRN, Peng et al., 2023, section 3.2 and eq. 22)."""
    context, dim = scaling.original_max_position_embeddings, config.rotary_dim or config.head_dim

    def channel_of(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp, _yarn_factor(scaling)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _longrope_factor(scaling: RopeScaling) -> float:
    """Keep attention as sharp as in the original context (LongRoPE, Ding et al., 2024; the formula of its implementation)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
