"""ArkVale: the pages whose keys could score best within a box as wide as they lie around its centre in the mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvseek.plugins.peers.base import KeyedIndex, Pages, Region, bounds_of_pages, in_pages, of_pages, peer_traits

PAPER = {"top_k": 1024, "page": 32, "dense_layers": 2}


@dataclass(frozen=True)
class Config(Pages):
    """How many rows are kept, and how they lie together."""

    top_k: int = 1024
    dense_layers: int = 2
    page: int = 32


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


traits = peer_traits
create = ArkValeIndex
