"""Rows that PRKV keeps on the device for layers whose row pool lies in host memory."""

from __future__ import annotations

import torch

from kvseek.plugins.contract import IndexContext

from .config import Config


class RowStore:
    """Static rows and pages of each slot's last steps, of one layer.

    A page stays where it is while steps select it, and longer if no other needs its place; its rows come there with the
    attention of the step that selects it first (DeviceSelection.keep). With S the most static rows and C pages:

    Attributes
    ----------
    rows : Tensor [slots, G, S + C * page, 2, D]
        The static rows by place, then the pages.
    static_held : Tensor, int32 [slots, G]
        Static rows that are there.
    held : Tensor, int32 [slots, G, C]
        Page that each place for a page holds, or -1.
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
        """Let no row of a slot be found."""
        self.static_held[slot] = 0
        self.held[slot] = -1


def cached_pages(config: Config) -> int:
    """Pages of a slot and KV head that the store has room for: what a step selects."""
    static = 0 if config.automatic else config.fixed_static
    return config.cache_steps * (config.top_k - static) // config.page
