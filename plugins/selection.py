"""What a method selects for a batch of queries: which rows of the retrieval region to attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS


@dataclass(frozen=True)
class Selection:
    """Retrieval rows to attend to.

    Attributes
    ----------
    rows : Tensor, int32 [batch, G, entries]
        Entry e stands for retrieval positions e*block .. e*block + block - 1 (those below the slot's length);
        -1 is no entry. No entry occurs twice in one [batch, KV head].
    block : int
        Rows per entry: 1, or the page size of a page-wise method.
    counts : tuple of int, one per request
        Rows that one KV head attends to, known without reading `rows` back from a device (mean over KV heads).
    """

    rows: Tensor
    block: int
    counts: tuple[int, ...]

    @classmethod
    def everything(cls, lengths: Sequence[int], kv_heads: int, device: torch.device) -> Selection:
        """Select all rows of retrieval regions of `lengths` tokens: pages of one extent."""
        pages = torch.arange(max(1, -(-max(lengths) // EXTENT_TOKENS)), dtype=torch.int32, device=device)
        held = torch.tensor(lengths, dtype=torch.int32, device=device)[:, None]
        rows = torch.where(pages * EXTENT_TOKENS < held, pages, -1)
        return cls(rows[:, None].expand(-1, kv_heads, -1).contiguous(), EXTENT_TOKENS, tuple(lengths))


@dataclass(frozen=True)
class DeviceSelection:
    """Retrieval rows to attend to, as the attention kernel of the GPU reads them (plugins/attention/device.py).

    Attributes
    ----------
    rows : Tensor, int32 [batch, G, entries]
        Places in the retrieval region, -1 for none, none of them twice. Neighbouring places should be neighbouring
        entries: they are read together. Those of requests with `dense` set are undefined.
    store : Tensor [slots, G, store_rows, 2, D] or None
        Rows that the method keeps on the device.
    cached : Tensor, int32 [batch, G, entries] or None
        Row of `store` that holds the entry's row, or -1: read the pool.
    keep : Tensor, int32 [batch, G, entries] or None
        Row of `store` that receives a copy of the entry's row, or -1. No row that this step reads as `cached`.
    """

    rows: Tensor
    store: Tensor | None = None
    cached: Tensor | None = None
    keep: Tensor | None = None
