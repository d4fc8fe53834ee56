"""An index that remembers nothing: the last rows of the retrieval region are known by their number alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.plugins.contract import Index, IndexContext
from kvseek.plugins.selection import Selection

from .config import Config


class LatestIndex(Index):
    """Selects the last top_k rows of a slot, whatever the query is."""

    bytes_per_token = 0.0

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build."""

    def extend(self, slot: int, keys: Tensor) -> None:
        """See Index.extend."""

    def select(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        """See Index.select."""
        top_k, lengths = self.context.config.top_k, [self.context.lengths[slot] for slot in slots]
        last = torch.tensor(lengths)[:, None] - 1 - torch.arange(top_k)
        rows = last.clamp(min=-1).int()[:, None].expand(-1, self.context.num_kv_heads, -1)
        return Selection(rows.contiguous(), 1, tuple(min(top_k, length) for length in lengths))


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """The builder has nothing to compute."""
    return {}


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return LatestIndex(context)
