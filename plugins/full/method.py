"""Dense attention behind the retrieval contract: no index, every row selected."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvseek.plugins.base import Index, IndexContext, Selection

from .config import Config


class FullIndex(Index):
    """Holds nothing and selects everything."""

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build: nothing to do."""

    def extend(self, slot: int, keys: Tensor) -> None:
        """See Index.extend: nothing to do."""

    def select(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        """All rows of each slot, as pages of one extent."""
        lengths = [self.context.lengths[slot] for slot in slots]
        return Selection.everything(lengths, self.context.num_kv_heads, queries.device)

    @property
    def bytes_per_token(self) -> float:
        """There is no index."""
        return 0.0


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """Nothing to compute when the engine is built."""
    return {}


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return FullIndex(context)
