"""What attention reads of one layer of the cache: the window, and rows of the retrieval region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.extents import extents_for


@dataclass(frozen=True)
class LayerCache:
    """One layer of the cache as attention reads it, for the requests of a batch.

    Attributes
    ----------
    slots : sequence of int
        Slot of each request of the batch.
    window : Tensor [all slots, G, window, 2, D]
        Window rows, K then V.
    window_tokens : Tensor, int32 [batch, 3]
        Per request: sink rows (they start at row 0); first ring row, counted from the ring's start; ring rows (they wrap).
    rows : Tensor [extents, G, 1024, 2, D]
        This layer's part of the row pool (strided by extent).
    table : Tensor, int32 [all slots, max_extents]
        Extents of each slot.
    lengths : Tensor, int32 [batch]
        Retrieval tokens of each request.
    sink : int
        Capacity of the sink: the ring starts at window row `sink`.
    """

    slots: Sequence[int]
    window: Tensor
    window_tokens: Tensor
    rows: Tensor
    table: Tensor
    lengths: Tensor
    sink: int

    def window_rows(self, request: int) -> Tensor:
        """Window rows of one request in token order, [G, tokens, 2, D] (a copy; for references)."""
        sink_rows, first, count = self.window_tokens[request].tolist()
        ring = self.window.shape[2] - self.sink
        wrapped = (torch.arange(first, first + count, device=self.window.device) % max(1, ring)) + self.sink
        index = torch.cat([torch.arange(sink_rows, device=self.window.device), wrapped])
        return self.window[self.slots[request]][:, index]

    def retrieval_rows(self, request: int) -> Tensor:
        """Retrieval rows of one request in token order, [G, n, 2, D] (a copy; for references)."""
        n = int(self.lengths[request])
        parts = [self.rows[e] for e in self.table[self.slots[request], : extents_for(n)].tolist()]
        if not parts:
            return self.rows.new_empty((self.rows.shape[1], 0, *self.rows.shape[3:]))
        return torch.cat(parts, dim=1)[:, :n]
