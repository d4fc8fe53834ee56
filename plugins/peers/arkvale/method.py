"""ArkVale: the pages whose keys could score best within a box as wide as they lie around its centre in the mean."""

from __future__ import annotations

from torch import Tensor

from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.peers.base import KeyedIndex, Region, bounds_of_pages, in_pages, of_pages, peer_traits

from .config import Config

__all__ = ["create", "traits"]


class ArkValeIndex(KeyedIndex):
    """Ranks pages by q · centre + Σ_c |q_c| · half-width_c, averaged over the heads of a group."""

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Give each row the score of its page."""
        page, keys = self.config.page, self.keys(region)
        least, most = bounds_of_pages(keys, region.valid, page)
        centres, filled = (least + most) / 2, in_pages(region.valid[None], page, False)
        distances = (in_pages(keys, page, 0.0) - centres[:, :, None]).abs().masked_fill(~filled[..., None], 0)
        widths = distances.sum(dim=2) / filled.sum(dim=2).clamp(min=1)[..., None]
        scores = queries @ centres.transpose(1, 2) + queries.abs() @ widths.transpose(1, 2)
        return of_pages(scores.mean(dim=1), page, len(region.places))


def traits(config: Config) -> Traits:
    """Return the method's traits."""
    return peer_traits(config)


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return ArkValeIndex(context)
