"""The nested method in PyTorch, on any device: the definition of correct for the native and GPU kernels.

The 2 highest bits of all codes find candidates, and all 4 bits choose among them (kernels/reference/codes/key_codes.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.batch import Batch
from kvseek.core.index_context import IndexContext
from kvseek.core.selection import Selection
from kvseek.kernels.reference.codes.key_codes import QueryLanes, estimate_all, estimate_at, mean_products, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.kernels.reference.codes.store import CodeStore
from kvseek.plugins.contract import Effort, Index
from kvseek.plugins.group import best_positions, select_each, softmax_mean

from .config import Config

FIRST_BITS = 2  # of a code's 4: what the scan reads of every key


class ReferenceIndex(Index):
    """The index of one layer; `codes` holds its arrays."""

    store_type = CodeStore

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.config: Config = context.config
        self.codes = self.store_type(context, context.codebooks["signs"])

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the codes."""
        return self.codes.bytes_per_token

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build; the queries are not used."""
        self.codes.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. No selection reads beyond a region's length, so there is nothing to publish."""
        self.codes.append(slot, start, keys)

    def effort(self, length: int) -> Effort:
        """See Index.effort. The rows are the top k; the number is that of the candidates."""
        return Effort(min(self.config.top_k, length), (self.config.candidate_count(length),))

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See Index.select. The rows are the top k, ascending (select_each)."""
        return select_each(queries, batch, self.context.num_kv_heads, self.config.top_k, self._places)

    def _places(self, queries: Tensor, slot: int, n: int) -> Tensor:
        # queries [G, g, D] to ascending places int64 [G, top_k]
        lanes = self.lanes(queries)
        candidates = self.candidates(lanes, slot, n)
        estimates = estimate_at(self.codes.read(slot, n), candidates, lanes)
        values = softmax_mean(estimates, self.context.scaling)
        return candidates.gather(1, best_positions(values, self.config.top_k))

    def lanes(self, queries: Tensor) -> QueryLanes:
        """Rotate and round queries: [G, g, D] to [G, g, P]."""
        return round_lanes(rotate(queries.float(), self.codes.signs))

    def candidates(self, lanes: QueryLanes, slot: int, n: int) -> Tensor:
        """Choose the places among which 4 bits choose: int64 [G, c], ascending."""
        return best_positions(self.scores(lanes, slot, n), self.config.candidate_count(n))

    def scores(self, lanes: QueryLanes, slot: int, n: int) -> Tensor:
        """Score a slot's first n keys by 2 bits, for lanes [G, lanes, P]: float32 [G, n].

        A key counts with the largest of its estimates over the group's queries, each less the query's product with the mean of
        the first block, and divided by the query's length. Otherwise the longest query would find most candidates, or the one
        whose product with all keys is large, whatever the others look for.
        """
        codes, lanes = self.codes.read(slot, n), lanes.of_length_one()
        first = mean_products(codes.at(torch.zeros_like(codes.scales[:, :1], dtype=torch.int64)), lanes) * lanes.steps
        return (estimate_all(codes, lanes, FIRST_BITS) - first).amax(dim=1)
