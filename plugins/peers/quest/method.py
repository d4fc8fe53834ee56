"""Quest: the pages whose keys could score best, as the smallest and the largest number of each of their channels tell."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvseek.plugins.peers.base import KeyedIndex, Pages, Region, bounds_of_pages, of_pages, peer_traits

PAPER = {"top_k": 2048, "page": 16, "dense_layers": 2}


@dataclass(frozen=True)
class Config(Pages):
    """How many rows are kept, and how they lie together."""

    top_k: int = 2048
    dense_layers: int = 2
    page: int = 16


class QuestIndex(KeyedIndex):
    """Ranks pages by the bound Σ_c max(q_c · min_c, q_c · max_c), averaged over the heads of a group."""

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Give each row the bound of its page."""
        page = self.config.page
        least, most = bounds_of_pages(self.keys(region), region.valid, page)
        bounds = queries.relu() @ most.transpose(1, 2) - (-queries).relu() @ least.transpose(1, 2)
        return of_pages(bounds.mean(dim=1), page, len(region.places))


traits = peer_traits
create = QuestIndex
