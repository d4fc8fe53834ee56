"""Exact top-k: score every retrieval key. The upper bound of token-level retrieval, in PyTorch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.ranking import RankedIndex, best_positions, softmax_mean

from .config import Config

__all__ = ["create", "traits"]


class FlatIndex(RankedIndex):
    """An index that keeps a copy of the keys, [extents, G, 1024, D] in the cache's dtype; scores are float32."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        shape = (context.extents.capacity, context.num_kv_heads, EXTENT_TOKENS, context.head_dim)
        self.keys = torch.empty(shape, dtype=context.dtype, device=context.device)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the copy of the keys."""
        return self.context.num_kv_heads * self.context.head_dim * self.context.dtype.itemsize

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; the queries are not used."""
        self.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. The keys are invisible as yet, because no selection reads beyond a region's length."""
        self.context.extents.write(self.keys, slot, start, keys)

    def best(self, queries: Tensor, slot: int, length: int) -> Tensor:
        keys = self.context.extents.read(self.keys, slot, length)
        return exact_top_k(queries, keys, self.config.top_k, self.context.scaling)


def exact_top_k(queries: Tensor, keys: Tensor, top_k: int, scaling: float) -> Tensor:
    """Find the best keys by exact scores: queries [G, g, D], keys [G, n, D] to indexes int64 [G, min(top_k, n)].

    The indexes ascend; of equal scores at the cut the lowest indexes are kept.
    """
    scores = queries.float() @ keys.float().transpose(1, 2)
    return best_positions(softmax_mean(scores, scaling), top_k)


def traits(config: Config) -> Traits:
    """Return the method's traits: it runs only on the CPU, because it is for comparisons and has no kernels."""
    return Traits(devices=("cpu",), prefix_reuse="entries")


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return FlatIndex(context)
