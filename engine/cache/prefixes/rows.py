"""What prefix reuse does with rows, index entries and extents. prefix_cache.py decides it.

Of an engine of several ranks rank 0 alone decides. All ranks do it, each with the rows and the entries of its own KV heads
(engine/parallel/).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.engine.cache.cache import Cache
from kvseek.plugins.contract import Index


class PrefixRows:
    """Keeps the extents of slots for later requests, and what belongs to them.

    Parameters
    ----------
    indexes : sequence of Index
        The index of each layer.
    shares_entries : bool
        Whether index entries of whole extents are kept with them (Traits.prefix_reuse).

    Attributes
    ----------
    sink_rows : dict of int to Tensor [layers, G, sink, 2, D], in host memory
        Rows of the sink of each kept sequence, by its first extent. Pinned, if the engine computes on a GPU.
    """

    def __init__(self, cache: Cache, indexes: Sequence[Index], shares_entries: bool) -> None:
        self.cache, self.indexes, self.shares_entries = cache, indexes, shares_entries
        self.sink_rows: dict[int, Tensor] = {}

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a slot that has extents those of `tokens` retrieval tokens; see ExtentTable.reserve."""
        self.cache.extents.reserve(slot, tokens)

    @torch.inference_mode()
    def complete(self, slot: int, kept: int, places: int) -> None:
        """Put the rows of a slot's first `places` tokens behind the sink into its extents, and index the whole ones.

        Parameters
        ----------
        kept : int
            Places that are kept already, in whole extents: those of the slot may be other ones, and are not written.
        """
        self.cache.write_ring(slot, max(kept, self.cache.lengths[slot]), places)
        if self.shares_entries:
            self._index(slot, max(kept, self.cache.lengths[slot]), places // EXTENT_TOKENS * EXTENT_TOKENS)

    def keep(self, slot: int, extents: Sequence[int], begins: bool) -> None:
        """Keep these extents of a slot; `begins`: a sequence begins with the first of them."""
        for extent in extents:
            self.cache.extents.keep(extent)
        if begins:
            sink_rows = self.cache.window[:, slot, :, : self.cache.config.sink].clone()
            if sink_rows.is_cuda:  # many sequences would take much of its memory, and use it seldom
                sink_rows = sink_rows.to("cpu", non_blocking=True)
            self.sink_rows[extents[0]] = sink_rows

    def forget(self, extents: Sequence[int]) -> None:
        """Keep these extents no longer."""
        for extent in extents:
            self.cache.extents.forget(extent)
            self.sink_rows.pop(extent, None)

    def _index(self, slot: int, start: int, stop: int) -> None:
        """Index a slot's places from `start` to `stop`, the end of an extent, whose rows lie in the pool."""
        if stop <= start:
            return
        spans = self.cache.extents.spans(slot, start, stop)
        for layer, index in enumerate(self.indexes):
            blocks = self.cache.rows.blocks(layer, [one[0] for one in spans])
            for block, (_, inside, source) in zip(blocks, spans, strict=True):
                index.append(slot, start + source.start, block[:, inside, 0].contiguous())
