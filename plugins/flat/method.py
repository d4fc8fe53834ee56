"""Exact top-k: score every retrieval key. The upper bound of token-level retrieval, in PyTorch on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.plugins.contract import Index, IndexContext
from kvseek.plugins.selection import Selection
from kvseek.plugins.shared.group import best_positions, query_lanes, reduce_scores

from .config import Config


class FlatIndex(Index):
    """Keeps its own copy of the keys, [extents, G, 1024, D] in the cache's dtype; scores are float32."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.config: Config = context.config
        shape = (context.extents.capacity, context.num_kv_heads, EXTENT_TOKENS, context.head_dim)
        self.keys = torch.empty(shape, dtype=context.dtype, device=context.device)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; the queries are not used."""
        self.context.extents.write(self.keys, slot, 0, keys)

    def extend(self, slot: int, keys: Tensor) -> None:
        """See Index.extend."""
        self.context.extents.write(self.keys, slot, self.context.lengths[slot] - keys.shape[1], keys)

    def select(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        """Top k rows of each request and KV head: queries [batch, H, D] to rows int32 [batch, G, top_k].

        Rows ascend by position; -1 fills up when the region holds fewer than top_k.
        """
        kv_heads, top_k = self.context.num_kv_heads, self.config.top_k
        rows = torch.full((len(slots), kv_heads, top_k), -1, dtype=torch.int32, device=queries.device)
        for request, slot in enumerate(slots):
            keys = self.context.extents.read(self.keys, slot, self.context.lengths[slot])
            grouped = queries[request].reshape(kv_heads, -1, queries.shape[-1])
            positions = exact_top_k(grouped, keys, top_k, self.config.group_reduce, self.context.scaling)
            rows[request, :, : positions.shape[1]] = positions.int()
        return Selection(rows, 1, tuple(min(top_k, self.context.lengths[slot]) for slot in slots))

    @property
    def bytes_per_token(self) -> float:
        """The copy of the keys."""
        return self.context.num_kv_heads * self.context.head_dim * self.context.dtype.itemsize


def exact_top_k(queries: Tensor, keys: Tensor, top_k: int, group_reduce: str, scaling: float) -> Tensor:
    """Positions of the best keys by exact scores: queries [G, g, D], keys [G, n, D] to int64 [G, min(top_k, n)].

    Ascending; ties are cut by lowest position.
    """
    scores = query_lanes(queries, group_reduce) @ keys.float().transpose(1, 2)
    return best_positions(reduce_scores(scores, group_reduce, scaling), top_k)


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """The builder has nothing to compute."""
    return {}


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return FlatIndex(context)
