"""Synthetic keys and queries with the statistics that make retrieval what it is on real ones.

What real post-RoPE keys show, and how it is made here, per KV head:

- a large mean that all keys share, most of it in few channels: `mean_scale`, `outlier_channels`, `outlier_scale`;
- a covariance whose eigenvalues fall off as a power of their rank, in no particular basis: x is scaled by
  rank^(-decay/2) and turned by a random rotation (frequent topics make the first eigenvalues larger still);
- text has topics of very different frequency that persist: x = √s·topic + √(1-s)·noise, with the topic drawn from a Zipf
  law and kept for a run of tokens, whose lengths are geometric;
- attention is concentrated: a query looks for one topic, and its score there exceeds the mean by `sharpness` on average.

Only the mass that the best rows hold was fitted, by hand: the best 100 of 8,192 keys hold about two thirds of the softmax
mass, as they do for SmolLM2 on a document (bench/accuracy/recall.py). Keys are independent of the layer; benchmarks turn one
set of keys into that of another layer by flipping the signs of channels, which changes none of the above.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """Statistics of the keys of one KV head; see the module's docstring. Lengths are in units of a key's deviation."""

    decay: float = 1.0
    mean_scale: float = 0.4
    outlier_channels: int = 4
    outlier_scale: float = 6.0
    topics: int = 1024
    topic_share: float = 0.6
    zipf: float = 1.1
    run_tokens: int = 24
    sharpness: float = 12.0


class SyntheticKeys:
    """Keys [G, n, D] and queries [H, n, D] on `device`, the same for the same seed, device type and sequence of calls."""

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device, seed: int) -> None:
        self.spectrum = Spectrum()
        self.kv_heads, self.head_dim, self.device = kv_heads, head_dim, device
        self._generator = torch.Generator(device).manual_seed(seed)
        deviation = torch.arange(1, head_dim + 1, device=device).float() ** (-self.spectrum.decay / 2)
        self._deviation = deviation * (head_dim / deviation.square().sum()).sqrt()  # mean square 1
        self._rotation = torch.linalg.qr(self._normal(kv_heads, head_dim, head_dim))[0]
        self._topics = self._normal(kv_heads, self.spectrum.topics, head_dim)
        frequency = torch.arange(1, self.spectrum.topics + 1, device=device).double() ** -self.spectrum.zipf
        self._cumulative = (frequency / frequency.sum()).cumsum(0)
        self.mean = self._mean()

    def reseed(self, seed: int) -> None:
        """Draw what comes next as another sequence of calls would: topics and rotations stay what they are."""
        self._generator.manual_seed(seed)

    def keys(self, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The next `tokens` keys of every KV head, [G, tokens, D]; runs of topics are the same in all of them."""
        keys = torch.empty(self.kv_heads, tokens, self.head_dim, dtype=dtype, device=self.device)
        topic = self.topic_runs(tokens)
        share = self.spectrum.topic_share
        for head in range(self.kv_heads):
            noise = self._normal(tokens, self.head_dim)
            x = noise.mul_((1 - share) ** 0.5).add_(self._topics[head, topic], alpha=share**0.5)
            keys[head] = (x * self._deviation) @ self._rotation[head].T + self.mean[head]
        return keys

    def values(self, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [G, tokens, D]: independent normal numbers."""
        return self._normal(self.kv_heads, tokens, self.head_dim).to(dtype)

    def queries(self, heads: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Queries [H, count, D]. Each seeks one topic, kept for runs of queries, with noise of half its length.

        Scores are meant to be scaled by 1/√D, as attention does.
        """
        topic = self.topic_runs(count)
        sought = self._topics[:, topic].repeat_interleave(heads // self.kv_heads, dim=0)
        sought = sought + 0.5 * self._normal(heads, count, self.head_dim)
        rotation = self._rotation.repeat_interleave(heads // self.kv_heads, dim=0)
        # <deviation·topic, topic> is the sum of the deviations on average: that score becomes `sharpness`
        reach = self.spectrum.topic_share**0.5 * self._deviation.sum() / self.head_dim**0.5
        queries: Tensor = (sought * (self.spectrum.sharpness / reach)) @ rotation.transpose(1, 2)
        return queries.to(dtype)

    def topic_runs(self, tokens: int) -> Tensor:
        """Topic of each token, int64 [tokens]: geometric runs of Zipf-distributed topics."""
        uniform = torch.rand(tokens, device=self.device, generator=self._generator)
        run = (uniform < 1 / self.spectrum.run_tokens).long().cumsum(0)
        draws = torch.rand(tokens + 1, device=self.device, generator=self._generator, dtype=torch.float64)
        topics = torch.searchsorted(self._cumulative, draws).clamp_(max=self.spectrum.topics - 1)
        chosen: Tensor = topics[run]
        return chosen

    def signs(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random ±1 of each channel, [G, 1, D]: times the keys, they are those of another layer."""
        bits = torch.randint(0, 2, (self.kv_heads, 1, self.head_dim), device=self.device, generator=self._generator)
        signs: Tensor = 2 * bits - 1
        return signs.to(dtype)

    def _mean(self) -> Tensor:
        """Mean key [G, 1, D], most of its square in a few channels that differ between heads."""
        mean = self._normal(self.kv_heads, 1, self.head_dim)
        order = torch.rand(self.kv_heads, self.head_dim, device=self.device, generator=self._generator).argsort(dim=-1)
        outlier = order[:, None] < self.spectrum.outlier_channels
        return torch.where(outlier, self.spectrum.outlier_scale * mean.sign(), self.spectrum.mean_scale * mean)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self._generator)
