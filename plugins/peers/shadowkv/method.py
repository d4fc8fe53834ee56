"""ShadowKV: the chunks whose mean key scores best, and those that their mean describes worst."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.peers.base import KeyedIndex, Region, in_pages, of_pages, peer_traits
from kvseek.plugins.ranking import best_positions

from .config import Config

__all__ = ["create", "traits"]


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


def traits(config: Config) -> Traits:
    """Return the method's traits."""
    return peer_traits(config)


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return ShadowIndex(context)
