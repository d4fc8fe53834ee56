"""The latest rows: attends to the last tokens that have left the window."""

import torch
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.index_context import IndexContext
from kvseek.core.selection import Selection
from kvseek.plugins.contract import Effort, Index, Traits

from .config import Config


class LatestIndex(Index):
    """Remembers nothing: the last rows of a region are known by their number alone."""

    bytes_per_token = 0.0

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """Nothing to index: rows stay in the order of their tokens, and no work runs on."""

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """Nothing to take in."""

    def effort(self, length: int) -> Effort:
        """All rows of a short region."""
        return Effort(rows=min(self.context.config.top_k, length))

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """The last top_k places of each request, whatever its queries are; -1 where there are fewer."""
        back = torch.arange(1, self.context.config.top_k + 1)
        places = (batch.column("length")[:, None] - back).clamp(min=-1).int()
        rows = places[:, None].expand(-1, self.context.num_kv_heads, -1)
        return Selection(rows.contiguous())


def traits(config: Config) -> Traits:
    """Engines on a GPU refuse the method: it has no index for them."""
    return Traits(devices=("cpu",))


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return LatestIndex(context)
