"""H2O: heavy hitters, the rows that have received most attention so far, and the latest rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvseek.core.errors import require
from kvseek.core.index_context import IndexContext
from kvseek.plugins.peers.base import KeyedIndex, Region, TopK, all_queries, attention_received, peer_traits
from kvseek.plugins.ranking import best_positions

EVICTS = True
PAPER = {"top_k": 1024, "recent_share": 0.5}  # a fifth of its prompts of 5,000 tokens, half of it for the latest rows


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how many of them for being recent.

    Attributes
    ----------
    recent_share : float
        Share of the rows that are the latest ones.
    recent_queries : int
        Latest queries, whose attention to the rows that leave the window counts as these rows' past.
    """

    top_k: int = 1024
    recent_share: float = 0.5
    recent_queries: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.recent_share <= 1, "recent_share", self.recent_share, "in [0, 1]", "0.5 is the default")
        require(self.recent_queries >= 1, "recent_queries", self.recent_queries, ">= 1", "256 is the default")

    @property
    def recent(self) -> int:
        """Latest rows that are kept."""
        return int(self.recent_share * self.top_k)


class HeavyIndex(KeyedIndex):
    """Keeps the attention that each row has received, float32 [slots, G, tokens], -inf for rows that are gone.

    Rows that leave the window have a past that no index sees, so the latest queries are kept, too: [slots, recent_queries, H, D].
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        slots, most = context.extents.slots, self.config.recent_queries
        self.received = self.by_slot()
        self.recent = torch.zeros((slots, most, context.num_heads, context.head_dim), device=context.device)
        self.seen = torch.zeros(slots, dtype=torch.int64, device=context.device)  # queries, by slot

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build. All queries that are given count, each for the rows that are at least a window before it."""
        super().build(slot, keys, queries)
        n = keys.shape[1]
        queries = queries[
            :, max(0, queries.shape[1] - n) :
        ]  # as many as are known of every prompt: Traits.last_queries
        latest = queries[:, -self.config.recent_queries :].transpose(0, 1)
        self.recent[slot, : len(latest)], self.seen[slot] = latest.float(), len(latest)
        if n:
            sums = attention_received(queries, keys, self.context.scaling, causal=True)
            self.received[slot, :, :n] = sums.mean(dim=1)
            self._evict(slot, n)

    def publish(self, slot: int, start: int, count: int) -> None:
        """See Index.publish. The rows are worth what the latest queries attended to them; then the least of all are gone."""
        n, keys = start + count, self.context.extents.read(self.copies, slot, start + count)
        self.received[slot, :, start:n] = 0
        known = torch.arange(self.recent.shape[1], device=keys.device) < self.seen[slot : slot + 1]
        kept, queries = self.received[slot, :, :n] > -torch.inf, self.recent[slot].transpose(0, 1)
        sums = attention_received(queries, keys, self.context.scaling, kept=kept, counted=known)
        self.received[slot, :, start:n] = sums.mean(dim=1)[:, start:]
        self._evict(slot, n)

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Return what the kept rows have received, this step included."""
        n, slot = len(region.places), region.slot.long()
        received = self.received.index_select(0, slot)[0, :, :n]
        kept = (received > -torch.inf) & region.valid
        latest = queries.flatten(0, 1)
        sums = attention_received(latest[:, None], self.keys(region), self.context.scaling, kept=kept).mean(dim=1)
        received = torch.where(kept & region.selects, received + sums, received)
        self.received[:, :, :n].index_copy_(0, slot, received[None])
        most = self.recent.shape[1]
        seen = self.seen.index_select(0, slot)
        self.recent.flatten(0, 1).index_copy_(0, slot * most + seen % most, latest[None])
        self.seen.index_copy_(0, slot, seen + region.selects)
        return received

    def _evict(self, slot: int, n: int) -> None:
        """Keep the latest rows and the heaviest of the others, as many as fit."""
        received, old = self.received[slot, :, :n], max(0, n - self.config.recent)
        heavy = best_positions(received[:, :old], self.config.top_k - self.config.recent)
        gone = torch.zeros_like(received, dtype=torch.bool)
        gone[:, :old] = True
        received.masked_fill_(gone.scatter_(1, heavy, False), -torch.inf)


traits = partial(peer_traits, prefix_reuse="copies", last_queries=all_queries)
create = HeavyIndex
