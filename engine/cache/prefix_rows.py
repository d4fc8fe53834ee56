"""What prefix reuse does with rows, index entries and extents. prefix_cache.py decides it.

Of an engine of several ranks rank 0 alone decides. All ranks do it, each with the rows and the entries of its own KV heads
(engine/parallel/).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvseek.core.config import EXTENT_TOKENS
from kvseek.plugins.contract import Index

from .cache import Cache
from .prefix import Head


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
    heads : dict of int to Head
        By the first extent of each kept sequence.
    """

    def __init__(self, cache: Cache, indexes: Sequence[Index], shares_entries: bool) -> None:
        self.cache, self.indexes, self.shares_entries = cache, indexes, shares_entries
        self.heads: dict[int, Head] = {}
        self._own_heads: dict[int, Head] = {}  # by slot: the one that was made of it

    def release(self, slot: int) -> None:
        """Forget what is known of a slot, which is closed next."""
        self._own_heads.pop(slot, None)

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a slot that has extents those of `tokens` retrieval tokens; see ExtentTable.reserve."""
        self.cache.extents.reserve(slot, tokens)

    @torch.inference_mode()
    def complete(self, slot: int, kept: int, places: int, first: int | None) -> None:
        """Put the rows of a slot's first `places` tokens behind the sink into its extents, and index the whole ones.

        Parameters
        ----------
        kept : int
            Places that are kept already, in whole extents: those of the slot may be other ones, and are not written.
        first : int or None
            The first of the extents that have the places kept.
        """
        for index in self.indexes:
            index.sort_rows(slot, kept)
        self.cache.write_ring(slot, max(kept, self.cache.lengths[slot]), places)
        if self.shares_entries:
            self._index(slot, kept, places // EXTENT_TOKENS * EXTENT_TOKENS, first)

    def keep(self, slot: int, extents: Sequence[int], begins: bool) -> None:
        """Keep these extents of a slot; `begins`: a sequence begins with the first of them."""
        for extent in extents:
            self.cache.extents.keep(extent)
        if begins:
            sink_rows = self.cache.window[:, slot, :, : self.cache.config.sink].clone()
            if sink_rows.is_cuda:  # many sequences would take much of its memory, and use it seldom
                sink_rows = sink_rows.to("cpu", non_blocking=True)
            states = tuple(index.prefix_state(slot) for index in self.indexes)
            self.heads[extents[0]] = self._own_heads[slot] = Head(sink_rows, states)

    def forget(self, extents: Sequence[int]) -> None:
        """Keep these extents no longer."""
        for extent in extents:
            self.cache.extents.forget(extent)
            self.heads.pop(extent, None)

    def _index(self, slot: int, kept: int, stop: int, first: int | None) -> None:
        """Index the whole extents of a slot, from place `kept` to `stop`, as those need it that have the places before."""
        if stop <= kept:
            return
        head = None if first is None else self.heads[first]
        for layer, index in enumerate(self.indexes):
            start = max(kept, self.cache.lengths[slot])
            if head is not None and head is not self._head_of(slot) and (state := head.states[layer]) is not None:
                # The extents before these are another request's, which read the same tokens with another state.
                index.adopt(slot, kept, state)
                start = kept
            spans = self.cache.extents.spans(slot, start, stop)
            blocks = self.cache.rows.blocks(layer, [one[0] for one in spans])
            for block, (_, inside, _) in zip(blocks, spans, strict=True):
                keys = block[:, inside, 0].contiguous()
                index.append(slot, start, keys)
                start += keys.shape[1]

    def _head_of(self, slot: int) -> Head | None:
        """Return the head on whose states the slot's entries depend; None: it has states of its own that nobody shares."""
        prefix = self.cache.prefixes.get(slot)
        return self._own_heads.get(slot) if prefix is None or not (prefix.shared or prefix.sparse) else prefix.head
