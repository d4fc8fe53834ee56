"""Rotary position embeddings (Su et al., 2021) with the scalings that Llama and Qwen checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvseek.core.config import ModelConfig, RopeScaling


class RotaryEmbedding:
    """Cosines and sines of positions, grown on demand; float32 [positions, D], scaled by the attention factor."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._frequencies, self._factor = frequencies(config)
        self._frequencies = self._frequencies.to(device)
        self._cos = self._sin = torch.empty(0, config.head_dim, device=device)

    def __call__(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions start .. stop - 1, each [stop - start, 1, D]."""
        self._grow(stop)
        return self._cos[start:stop, None], self._sin[start:stop, None]

    def at(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the given positions, each [len(positions), 1, D]."""
        self._grow(max(positions) + 1)
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def _grow(self, positions: int) -> None:
        if positions <= self._cos.shape[0]:
            return
        size = max(1024, 1 << (positions - 1).bit_length())
        angles = torch.outer(torch.arange(size, device=self._frequencies.device).float(), self._frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        self._cos, self._sin = angles.cos() * self._factor, angles.sin() * self._factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of channels (i, i + D/2) of x [tokens, heads, D]; the result has the dtype of x."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Compute the angle per position of each channel pair, float32 [D/2], and the factor on cosines and sines."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
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
    context, dim = scaling.original_max_position_embeddings, config.head_dim

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
