"""SnapKV: the rows of a prompt that its last queries attend to, chosen once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvseek.core.errors import require
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import LAST_QUERIES, Traits
from kvseek.plugins.peers.base import PeerIndex, Region, TopK, attention_received, peer_traits

EVICTS = True
PAPER = {"top_k": 1024, "window": 32, "kernel": 7, "cache.local": 32}
GENERATED = 2.0**20  # more than any vote; float32 tells the places behind it apart


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and who chooses them.

    Attributes
    ----------
    window : int
        Last queries of a prompt, whose attention chooses its rows; at most as many as the local window has tokens.
    kernel : int
        Neighbouring rows over which the largest attention counts; odd.
    """

    top_k: int = 1024
    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = f"from 1 to {LAST_QUERIES}"
        require(1 <= self.window <= LAST_QUERIES, "window", self.window, limit, "32 is the default")
        require(self.kernel >= 1 and self.kernel % 2 == 1, "kernel", self.kernel, "odd and >= 1", "7 is the default")


class SnapIndex(PeerIndex):
    """Keeps what each row is worth, float32 [slots, G, tokens]: votes in a prompt, and more, the later the better, behind it."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.worth = self.by_slot()

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build. The last queries vote."""
        n, most = keys.shape[1], self.worth.shape[2]
        self.worth[slot, :, n:] = GENERATED + torch.arange(n, most, device=keys.device)
        if n:
            votes = attention_received(queries[:, -self.config.window :], keys, self.context.scaling)
            kernel = self.config.kernel
            self.worth[slot, :, :n] = max_pool1d(votes, kernel, stride=1, padding=kernel // 2).mean(dim=1)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append; what generated rows are worth is known already."""

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Return what rows are worth, whatever the queries: a row that is not among the best once will never be again."""
        return self.worth.index_select(0, region.slot)[0, :, : len(region.places)]


def traits(config: Config) -> Traits:
    """Return the method's traits."""
    return peer_traits(config, prefix_reuse="copies", last_queries=lambda tokens: min(tokens, config.window))


create = SnapIndex
