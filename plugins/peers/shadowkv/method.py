"""ShadowKV: the chunks whose mean key scores best, and those that their mean describes worst."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvseek.core.errors import require
from kvseek.plugins.peers.base import KeyedIndex, Region, TopK, in_pages, of_pages, peer_traits
from kvseek.plugins.ranking import best_positions

PAPER = {"top_k": 2432, "chunk": 8, "outlier_share": 0.158, "cache.local": 32}  # 2,048 rows and 48 chunks of outliers


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how they lie together.

    Attributes
    ----------
    chunk : int
        Neighbouring rows that are taken together.
    outlier_share : float
        Share of the rows that are the chunks least like their mean key, whatever the query.
    """

    top_k: int = 2432
    chunk: int = 8
    outlier_share: float = 0.158

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chunk >= 1, "chunk", self.chunk, ">= 1", "8 is the default")
        fits = 0 <= self.outlier_share < 1
        require(fits, "outlier_share", self.outlier_share, "in [0, 1)", "0.158 is the default")

    @property
    def outliers(self) -> int:
        """Chunks of outliers."""
        return round(self.outlier_share * self.top_k / self.chunk)


class ShadowIndex(KeyedIndex):
    """Ranks chunks by the softmax weight of their mean key, the largest of a group's heads; outliers come first."""

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Give each row the weight of its chunk, 2 if that is an outlier."""
        size = self.config.chunk
        chunks, filled = in_pages(self.keys(region), size, 0.0), in_pages(region.valid[None], size, False)
        rows = filled.sum(dim=2)
        means = chunks.sum(dim=2) / rows.clamp(min=1)[..., None]
        likeness = cosine_similarity(chunks, means[:, :, None], dim=-1).masked_fill(~filled, torch.inf).amin(dim=2)
        outliers = best_positions(-likeness, self.config.outliers)
        found = torch.zeros_like(likeness, dtype=torch.bool).scatter_(1, outliers, True)
        scores = (queries @ means.transpose(1, 2)) * self.context.scaling
        weights = scores.masked_fill((found | (rows == 0))[:, None], -torch.inf).softmax(dim=-1).amax(dim=1)
        return of_pages(weights.masked_fill(found, 2.0), size, len(region.places))


traits = peer_traits
create = ShadowIndex
