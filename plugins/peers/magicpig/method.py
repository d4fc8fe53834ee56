"""MagicPIG: the rows whose hashes collide with the query's in most tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvseek.core.errors import require
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Traits
from kvseek.plugins.peers.base import POINTS, CodedPeer, DenseFirst, Region, peer_traits

PAPER = {"top_k": 2048, "bits": 10, "tables": 150, "dense_layers": 1}


@dataclass(frozen=True)
class Config(DenseFirst):
    """How many rows are kept, and how they are hashed.

    Attributes
    ----------
    bits : int
        Random planes of a hash table, which a key and a query must lie on the same side of.
    tables : int
        Hash tables.
    seed : int
        Of the planes.
    """

    top_k: int = 2048
    bits: int = 10
    tables: int = 150
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.bits <= 15, "bits", self.bits, "from 1 to 15", "10 is the default")
        require(self.tables >= 1, "tables", self.tables, ">= 1", "150 is the default")


class HashIndex(CodedPeer):
    """Keeps a hash for each table, int16 [tables] a row, of a key without the mean of the slot's first keys [slots, G, 1, D]."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        if not self.dense:
            self.planes = context.codebooks["planes"].to(context.device)
        self.codes = self.by_row(self.config.tables, torch.int16)
        shape = (context.extents.slots, context.num_kv_heads, 1, context.head_dim)
        self.means = torch.zeros(shape, device=context.device)

    def learn(self, slot: int, keys: Tensor) -> None:
        """Take the mean."""
        self.means[slot] = keys.mean(dim=1, keepdim=True)

    def encode(self, slot: int, keys: Tensor) -> Tensor:
        """Hash keys that are seen from their mean."""
        return self._hash(keys - self.means[slot])

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Count the tables in which a row collides with a query of the group; of fewer than two of a query none counts."""
        keys, total = self.read(self.codes, region), torch.zeros((), device=queries.device)
        for hashes in torch.split(self._hash(queries), 1, dim=1):
            collisions = (keys == hashes).sum(dim=2)
            total = total + torch.where(collisions >= 2, collisions, 0)
        return total.float()

    def _hash(self, vectors: Tensor) -> Tensor:
        """Hash vectors [G, n, D]: [G, n, tables]."""
        tables, weights = self.config.tables, 2 ** torch.arange(self.config.bits, device=vectors.device)
        sides = [(part @ self.planes > 0).short() for part in torch.split(vectors, POINTS, dim=1)]
        hashes = [(part.reshape(*part.shape[:2], tables, -1) * weights.short()).sum(dim=-1).short() for part in sides]
        return torch.cat(hashes, dim=1)


def planes(config: Config, head_dim: int) -> dict[str, Tensor]:
    """Draw the planes of all tables, for Traits.codebooks: float32 [D, tables * bits]."""
    generator = torch.Generator().manual_seed(config.seed)
    return {"planes": torch.randn(head_dim, config.tables * config.bits, generator=generator)}


def traits(config: Config) -> Traits:
    """Return the method's traits."""
    return peer_traits(config, prefix_reuse="copies", codebooks=partial(planes, config))


create = HashIndex
