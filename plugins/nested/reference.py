"""The nested method in PyTorch, on any device: the definition of correct for the native and GPU kernels.

The 2 highest bits of all codes find candidates, and all 4 bits choose among them (kernels/reference/codes/key_codes.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.kernels.reference.codes.key_codes import QueryLanes, estimate_all, mean_products
from kvseek.plugins.contract import Budget
from kvseek.plugins.ranking import CodedIndex, best_positions

from .config import Config

FIRST_BITS = 2  # of a code's 4: what the scan reads of every key


class ReferenceIndex(CodedIndex):
    """The index of one layer."""

    config: Config

    def budget(self, length: int) -> Budget:
        """See Index.budget. The rows are the top k; the field is the number of candidates."""
        return Budget(min(self.config.top_k, length), (self.config.candidate_count(length),))

    def candidates(self, lanes: QueryLanes, slot: int, length: int) -> Tensor:
        return best_positions(self.scores(lanes, slot, length), self.config.candidate_count(length))

    def scores(self, lanes: QueryLanes, slot: int, n: int) -> Tensor:
        """Score a slot's first n keys by 2 bits, for lanes [G, lanes, P]: float32 [G, n].

        A key counts with the largest of its estimates over the group's queries, each less the query's product with the mean of
        the first block, and divided by the query's length. Otherwise the longest query would find most candidates, or the one
        whose product with all keys is large, whatever the others look for.
        """
        codes, lanes = self.codes.read(slot, n), lanes.of_length_one()
        first = mean_products(codes.at(torch.zeros_like(codes.scales[:, :1], dtype=torch.int64)), lanes) * lanes.steps
        return (estimate_all(codes, lanes, FIRST_BITS) - first).amax(dim=1)
