"""Quest: the pages whose keys could score best, as the smallest and the largest number of each of their channels tell."""

from __future__ import annotations

from torch import Tensor

from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.peers.base import KeyedIndex, Region, bounds_of_pages, of_pages, peer_traits

from .config import Config

__all__ = ["create", "traits"]


class QuestIndex(KeyedIndex):
    """Ranks pages by the bound Σ_c max(q_c · min_c, q_c · max_c), averaged over the heads of a group."""

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Give each row the bound of its page."""
        page = self.config.page
        least, most = bounds_of_pages(self.keys(region), region.valid, page)
        bounds = queries.relu() @ most.transpose(1, 2) - (-queries).relu() @ least.transpose(1, 2)
        return of_pages(bounds.mean(dim=1), page, len(region.places))


def traits(config: Config) -> Traits:
    """Return the method's traits."""
    return peer_traits(config)


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return QuestIndex(context)
