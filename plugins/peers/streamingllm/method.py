"""StreamingLLM: the first tokens, which are the sink of every method, and the latest ones."""

from __future__ import annotations

from torch import Tensor

from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Index, Traits
from kvseek.plugins.peers.base import PeerIndex, Region, peer_traits

from .config import Config

__all__ = ["create", "traits"]


class StreamingIndex(PeerIndex):
    """An index that keeps nothing."""

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; there is nothing to index."""

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append; there is nothing to take in."""

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Take the latest."""
        return region.places.float().expand(queries.shape[0], -1)


def traits(config: Config) -> Traits:
    """Return the method's traits."""
    return peer_traits(config)


def create(context: IndexContext) -> Index:
    """Make the index of one layer."""
    return StreamingIndex(context)
