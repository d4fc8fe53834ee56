"""Exact top-k retrieval: the upper bound of every method that retrieves tokens. Scores all keys, so it is not fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.engine.config import EXTENT_TOKENS
from kvseek.plugins.base import Index, IndexContext, Selection
from kvseek.plugins.common.group import best_positions, query_lanes, reduce_scores

from .config import Config


class FlatIndex(Index):
    """Keeps its own copy of the keys, [extents, G, 1024, D], and compares each query with all of them."""

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
        """Top k rows by q·k: queries [batch, H, D] to ascending rows int32 [batch, G, top_k], -1 for none."""
        kv_heads, top_k = self.context.num_kv_heads, self.config.top_k
        rows = torch.full((len(slots), kv_heads, top_k), -1, dtype=torch.int32, device=queries.device)
        for request, slot in enumerate(slots):
            keys = self.context.extents.read(self.keys, slot, self.context.lengths[slot]).float()
            lanes = query_lanes(queries[request].unflatten(0, (kv_heads, -1)), self.config.group_reduce)
            values = reduce_scores(lanes @ keys.transpose(1, 2), self.config.group_reduce, self.context.scaling)
            positions = best_positions(values, min(top_k, keys.shape[1]))
            rows[request, :, : positions.shape[1]] = positions.int()
        return Selection(rows, 1, tuple(min(top_k, self.context.lengths[slot]) for slot in slots))

    @property
    def bytes_per_token(self) -> float:
        """One key per KV head."""
        return float(self.context.num_kv_heads * self.context.head_dim * self.context.dtype.itemsize)


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """Nothing to compute when the engine is built."""
    return {}


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return FlatIndex(context)
