"""StreamingLLM: the first tokens, which are the sink of every method, and the latest ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvseek.plugins.peers.base import PeerIndex, Region, TopK, peer_traits

EVICTS = True
PAPER = {"top_k": 764, "cache.sink": 4, "cache.local": 256}  # 4 first and 1,020 latest tokens


@dataclass(frozen=True)
class Config(TopK):
    """How many of the latest rows are kept.

    Attributes
    ----------
    top_k : int
        Rows before the local window.
    """

    top_k: int = 764


class StreamingIndex(PeerIndex):
    """An index that keeps nothing."""

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; there is nothing to index."""

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append; there is nothing to take in."""

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Take the latest."""
        return region.places.float().expand(queries.shape[0], -1)


traits = peer_traits
create = StreamingIndex
