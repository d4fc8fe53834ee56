"""Rows that PRKV keeps on the device for layers whose row pool lies in host memory."""

from __future__ import annotations

import torch

from kvseek.plugins.contract import IndexContext

from .config import Config


class RowStore:
    """Static rows and pages of each slot's last steps, of one layer.

    The store has room for C pages, in *frames*. A page stays in its frame while steps select it, and longer if no other page
    needs the frame. The attention of the step that first selects the page copies its rows there (Selection.keep). S is the
    largest number of static rows.

    Attributes
    ----------
    rows : Tensor [slots, G, S + C * page, 2, D]
        The static rows by place, then the frames.
    static_held : Tensor, int32 [slots, G]
        Number of static rows that the store holds.
    held : Tensor, int32 [slots, G, C]
        Number of the page in each frame, or -1.
    """

    def __init__(self, context: IndexContext) -> None:
        config: Config = context.config
        pages = cached_pages(config)
        heads, device = (context.extents.slots, context.num_kv_heads), context.device
        shape = (*heads, config.most_static + pages * config.page, 2, context.head_dim)
        self.rows = torch.empty(shape, dtype=context.dtype, device=device)
        self.static_held = torch.zeros(heads, dtype=torch.int32, device=device)
        self.held = torch.full((*heads, pages), -1, dtype=torch.int32, device=device)

    def forget(self, slot: int) -> None:
        """Mark a slot's part of the store, which held another request's rows, as empty: its next step reads the pool."""
        self.static_held[slot] = 0
        self.held[slot] = -1


def cached_pages(config: Config) -> int:
    """Return the pages of a slot and KV head that the store has room for: as many as a step selects."""
    static = 0 if config.automatic else config.fixed_static
    return config.cache_steps * (config.top_k - static) // config.page
