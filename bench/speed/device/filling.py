"""Row pools full of synthetic rows, and indexes built on them as the engine builds them after a prompt.

What real post-RoPE keys show, and how it is made here, per KV head:

- a large mean that all keys share, most of it in few channels: `mean_scale`, `outlier_channels`, `outlier_scale`;
- a covariance whose eigenvalues fall off as a power of their rank, in no particular basis: x is scaled by
  rank^(-decay/2) and turned by a random rotation (frequent topics make the first eigenvalues larger still);
- text has topics of very different frequency that persist: x = √s·topic + √(1-s)·noise, with the topic drawn from a Zipf
  law and kept for a run of tokens, whose lengths are geometric;
- attention is concentrated: a query looks for one topic, and its score there exceeds the mean by `sharpness` on average.

Only the mass that the best rows hold was fitted, by hand: the best 100 of 8,192 keys hold about two thirds of the softmax
mass, as they do for SmolLM2 on a document (bench/accuracy/recall.py). Keys are independent of the layer; one set of keys
becomes that of another layer by flipping the signs of channels, which changes none of the above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.bench.speed.device.memory_plan import CHUNK_TOKENS, SLOT_STRIDE, Cell, key_tokens
from kvseek.plugins.contract import LAST_QUERIES

if TYPE_CHECKING:
    from kvseek.core.model_config import ModelConfig
    from kvseek.engine.cache.cache import Cache
    from kvseek.plugins.contract import Index

    Target = tuple[Cache, list[list[Index]]]  # a cache, and the indexes of all layers over it


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


class Filler:
    """Fills caches and indexes with synthetic keys; every layer's are those of one text under other signs of channels.

    Parameters
    ----------
    cells : sequence of Cell
        All that will ever be filled: the text is as long as the longest of them needs.
    room : int
        Tokens that a request may grow by.
    """

    def __init__(
        self,
        model: ModelConfig,
        cells: Sequence[Cell],
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        room: int,
    ) -> None:
        longest = key_tokens(cells)
        self.source = SyntheticKeys(model.num_kv_heads, model.head_dim, device, seed)
        self._keys = self.source.keys(longest, dtype)
        self._values = self.source.values(min(longest, CHUNK_TOKENS), dtype)
        self.signs = [self.source.signs(dtype) for _ in model.row_layers]
        self.queries = self.source.queries(model.num_heads, LAST_QUERIES, dtype)
        self._group, self._room = model.group_size, room

    def keys(self, layer: int, slot: int, tokens: int, heads: slice = slice(None)) -> Tensor:
        """Keys [G, tokens, D] of a slot in a layer by token, of some KV heads (a copy)."""
        return self._text(slot, tokens)[heads] * self.signs[layer][heads]

    @torch.inference_mode()
    def fill(self, cell: Cell, targets: Sequence[Target]) -> None:
        """Make each cache hold the cell's requests, in slots 0, 1, ..., and build its indexes; other slots are closed.

        Every cache gets the same tokens. Rows of the host pool are copied from the
        device in pieces of an extent. `memory_plan.fill_bytes` counts what this holds at a time.
        """
        for cache, _ in targets:
            for slot in range(cache.padding_slot):
                cache.close(slot)
            for slot in range(cell.batch):
                cache.open(slot, cell.context + self._room)
                cache.begin_prefill(slot, with_empty_buffer(cache, cell.context))
        for layer in range(len(self.signs)):
            with self._turned(layer):
                for cache, index_sets in targets:
                    self._fill_layer(layer, cell.batch, cache, [indexes[layer] for indexes in index_sets])
        torch.cuda.synchronize()

    def _fill_layer(self, layer: int, slots: int, cache: Cache, indexes: Sequence[Index]) -> None:
        """Index and store all slots of a layer. What `build` leaves running ends before the keys are turned on."""
        works = []
        for slot in range(slots):
            keys = self._text(slot, cache.lengths[slot])
            queries = self.queries * self.signs[layer].repeat_interleave(self._group, dim=0)
            started = [index.build(slot, keys, queries) for index in indexes]
            works += [work for work in started if work is not None]
            self._write(layer, slot, keys, cache)
        for work in works:
            work.wait()

    def _write(self, layer: int, slot: int, keys: Tensor, cache: Cache) -> None:
        """Store keys [G, n, D], and as many values."""
        for start in range(0, keys.shape[1], CHUNK_TOKENS):
            part = keys[:, start : start + CHUNK_TOKENS]
            rows = torch.stack((part, self._values[:, : part.shape[1]]), dim=2)
            cache.rows.write(layer, rows[None], cache.extents.spans(slot, start, start + part.shape[1]))

    def _text(self, slot: int, tokens: int) -> Tensor:
        start = slot * SLOT_STRIDE
        return self._keys[:, start : start + tokens]

    @contextmanager
    def _turned(self, layer: int) -> Iterator[None]:
        """Make the keys those of a layer, in place: a copy would take gigabytes. Twice ±1 changes no bit."""
        self._keys.mul_(self.signs[layer])
        try:
            yield
        finally:
            self._keys.mul_(self.signs[layer])


def with_empty_buffer(cache: Cache, tokens: int) -> int:
    """Return how many of `tokens` tokens there are without those in the update buffer, so that `update` steps evict nothing."""
    region, config = cache.retrieval_tokens(tokens), cache.config
    return config.sink + config.local + 1 + region if region else tokens
