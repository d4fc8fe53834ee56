"""Rows that PRKV keeps on the device for layers whose row pool lies in host memory."""

from __future__ import annotations

import torch

from kvseek.plugins.contract import IndexContext

from .config import Config


class RowStore:
    """Static rows and pages of each slot's last steps, of one layer.

    The store has room for C pages, in *frames*. A page stays in its frame while steps select it, and longer if no other needs
    the frame; its rows come there with the attention of the step that selects it first (Selection.keep). S is the
    most static rows.

    Attributes
    ----------
    rows : Tensor [slots, G, S + C * page, 2, D]
        The static rows by place, then the frames.
    static_held : Tensor, int32 [slots, G]
        How many static rows are there.
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
        """Empty a slot's part, which held another request's rows: its next step reads all rows from the pool."""
        self.static_held[slot] = 0
        self.held[slot] = -1


def cached_pages(config: Config) -> int:
    """Pages of a slot and KV head that the store has room for: what a step selects."""
    static = 0 if config.automatic else config.fixed_static
    return config.cache_steps * (config.top_k - static) // config.page
