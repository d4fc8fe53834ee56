"""Dense attention behind the index contract: every retrieval row is selected."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvseek.plugins.contract import Index, IndexContext
from kvseek.plugins.selection import Selection

from .config import Config
from .costs import costs
from .device import DeviceFullIndex

__all__ = ["codebooks", "costs", "create"]


class FullIndex(Index):
    """Keeps nothing and selects everything."""

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; there is nothing to index."""

    def extend(self, slot: int, keys: Tensor) -> None:
        """See Index.extend; there is nothing to index."""

    def select(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        """All rows of each slot, in pages of one extent."""
        lengths = [self.context.lengths[slot] for slot in slots]
        return Selection.everything(lengths, self.context.num_kv_heads, queries.device)

    @property
    def bytes_per_token(self) -> float:
        """Nothing is stored."""
        return 0.0


def codebooks(config: Config, head_dim: int) -> dict[str, Tensor]:
    """The builder has nothing to compute."""
    return {}


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return DeviceFullIndex(context) if context.cuda else FullIndex(context)
