"""PRKV in PyTorch, on any device: the definition of correct for the GPU kernels.

The rows that the last queries attended to most have the first places of the pool (the static set), and every step attends to
them. The other rows form pages, of which a step chooses the best by what it knows of their keys (summaries.py). PRKV paper,
section 4.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.plugins.batch import Batch
from kvseek.plugins.contract import Built, Effort, Index, IndexContext
from kvseek.plugins.selection import Selection
from kvseek.plugins.shared.group import best_positions, softmax_mean

from .config import Config
from .static import automatic_count, candidates, largest, observation_scores, pair_exchange, static_first
from .summaries import Boxes, Codes, Summaries, read_pages

STAGGER = 4  # decode steps between the updates of neighbouring layers, so that no step has to publish them all


class ReferenceIndex(Index):
    """One layer's pages and static sets, in extents of 1,024 places.

    Page p of a slot holds places p * page .. p * page + page - 1, whichever tokens have these places; the first pages hold the
    static set. With E extents, G KV heads, P pages an extent, S the most static rows and w window queries:

    Attributes
    ----------
    summaries : Summaries
        What pages are scored by.
    picked : Tensor, int32 [E, G, P]
        How often a page was selected since the last update.
    static_rows : Tensor, int32 [slots]
        Number of static places of each KV head: those of whole pages.
    homes : Tensor, int32 [slots, G, S]
        For the rows of the first S places: approximately where they belong in the sequence. An update pairs rows by it.
    recent : Tensor [slots, w, H, D]
        The last queries, in any order.
    received : array of int64
        Queries that `recent` has received from the steps of each slot since its prompt.
    targets : list of Tensor, int64 scalar
        Number of static rows that each slot is to have as soon as it holds so many rows.
    tokens : Tensor, int32 [E, G, 1024], or None
        Retrieval token of each place, for `sort_rows`; None if no row ever changes its place, or none is kept.
    observe : callable
        static.observation_scores, or a function that computes the same: (queries, keys, scaling, valid) to scores.
    """

    observe: Callable[..., Tensor]

    def __init__(self, context: IndexContext, summaries: Summaries | None = None) -> None:
        super().__init__(context)
        self.config: Config = context.config
        self.summaries = summaries or (Boxes if self.config.page_score == "box" else Codes)(context)
        self.observe = observation_scores
        config, device, slots = self.config, context.device, context.extents.slots
        self.pages_of_extent = EXTENT_TOKENS // config.page
        pages = (context.extents.capacity, context.num_kv_heads, self.pages_of_extent)
        self.picked = torch.zeros(pages, dtype=torch.int32, device=device)
        self.static_rows = torch.zeros(slots, dtype=torch.int32, device=device)
        homes = (slots, context.num_kv_heads, config.most_static)
        self.homes = torch.zeros(homes, dtype=torch.int32, device=device)
        recent = (slots, config.window_queries, context.num_heads, context.head_dim)
        self.recent = torch.zeros(recent, dtype=context.dtype, device=device)
        self.targets: list[Tensor] = [torch.full((), config.fixed_static, device=device)] * slots
        rows = (context.extents.capacity, context.num_kv_heads, EXTENT_TOKENS)
        known = context.reuses_prefixes and config.most_static > 0
        self.tokens = torch.empty(rows, dtype=torch.int32, device=device) if known else None
        self.received = array("q", [0] * slots)
        self._steps = [0] * slots  # decode steps since the prompt

    @property
    def bytes_per_token(self) -> float:
        """Bytes of summaries, counts and tokens of places, of all KV heads; static sets and queries do not grow."""
        counts = self.context.num_kv_heads * self.picked.itemsize / self.config.page
        tokens = 0 if self.tokens is None else self.context.num_kv_heads * self.tokens.itemsize
        return self.summaries.bytes_per_token + counts + tokens

    def effort(self, length: int) -> Effort:
        """See Index.effort. The rows are the budget: static rows and rows of pages. The kernels need no numbers."""
        return Effort(min(self.config.top_k, length))

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> Built:
        """See Index.build. In the pool the static tokens come first, then the others, both in token order."""
        order = self.begin(slot, keys, queries)
        self.summaries.build(slot, ordered(keys, order))
        return Built(order=order)

    def begin(self, slot: int, keys: Tensor, queries: Tensor) -> Tensor | None:
        """Choose a prompt's static set and the order of its rows, and begin to count steps and pages; arguments of `build`.

        Reads nothing back from a device. Returns the order, int64 [G, n], or None for token order.
        """
        self._start(slot, queries)
        order = self._choose(slot, keys, queries)
        self._note_tokens(slot, order)
        return order

    def _choose(self, slot: int, keys: Tensor, queries: Tensor) -> Tensor | None:
        config, n = self.config, keys.shape[1]
        self.static_rows[slot].zero_()  # an assignment of a number would wait for the device
        self.homes[slot] = torch.arange(config.most_static, device=keys.device)  # for rows yet to come: their places
        if config.most_static == 0 or n < config.page:
            self.targets[slot] = torch.full((), config.fixed_static, device=keys.device)
            return None
        window = queries[:, -config.window_queries :]
        target = torch.full((), config.fixed_static, device=keys.device)
        if config.automatic and n > config.top_k:
            target = automatic_count(window, keys, self.context.scaling, config.top_k, config.page)
        self.targets[slot] = target
        count = target.clamp(max=n // config.page * config.page)
        scores = self.observe(window, keys, self.context.scaling)
        order = static_first(largest(scores, count, config.most_static))
        self.static_rows[slot] = count
        known = min(n, config.most_static)
        self.homes[slot, :, :known] = order[:, :known].int()
        return order

    def _start(self, slot: int, queries: Tensor) -> None:
        # The prompt's last queries become the recent queries; they are repeated if they are too few.
        window, extents = self.config.window_queries, self.context.extents
        self.received[slot] = self._steps[slot] = 0
        self.picked.index_fill_(0, self.extents_of(slot, extents.room(slot)), 0)
        if queries.shape[1]:
            last = queries[:, -window:].transpose(0, 1)
            self.recent[slot] = last[torch.arange(window, device=queries.device) % last.shape[0]]

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. New rows fill up the last page, then new pages."""
        self.summaries.append(slot, start, keys)

    def _note_tokens(self, slot: int, order: Tensor | None) -> None:
        """Note the tokens of all places that a slot has room for: the first in the order given, each other one its own number.

        So nothing is left to note when tokens leave the window. A few operations do it, whatever the number of extents.
        """
        if self.tokens is None:
            return
        heads, room = self.tokens.shape[1], self.context.extents.room(slot)
        numbers = torch.arange(room, dtype=torch.int32, device=self.tokens.device).repeat(heads, 1)
        if order is not None:
            numbers[:, : order.shape[1]] = order
        by_extent = numbers.view(heads, room // EXTENT_TOKENS, EXTENT_TOKENS).transpose(0, 1)
        self.tokens.index_copy_(0, self.extents_of(slot, room), by_extent)

    def row_order(self, slot: int) -> Tensor | None:
        """Copy the retrieval token of each place of a slot, int64 [G, n]; None: token order."""
        if self.tokens is None:
            return None
        return self.context.extents.read(self.tokens, slot, self.context.lengths[slot]).long()

    def places_from(self, slot: int, first: int) -> Tensor:
        """Find the places of retrieval tokens `first` and later of a slot: int64 [G, n - first], or [G, 0] in token order."""
        order = self.row_order(slot)
        if order is None:
            return torch.empty((self.context.num_kv_heads, 0), dtype=torch.int64, device=self.context.device)
        tokens = torch.arange(order.shape[1], device=order.device).expand_as(order)
        return torch.empty_like(order).scatter_(1, order, tokens)[:, first:]

    def sort_rows(self, slot: int, first: int) -> None:
        """See Index.sort_rows. Rows that are where they belong, all of them without a static set, are not copied."""
        sources, table = self.places_from(slot, first), self.context.extents.table[slot].long()
        numbers = first + torch.arange(sources.shape[1])
        for head, places in enumerate(sources):
            moved = (places != numbers).nonzero().flatten()
            if moved.numel() == 0:
                continue
            places, targets = places[moved], numbers[moved]
            rows = self._pool[table[places // EXTENT_TOKENS], head, places % EXTENT_TOKENS]
            self._pool[table[targets // EXTENT_TOKENS], head, targets % EXTENT_TOKENS] = rows

    def publish(self, slot: int, start: int, count: int) -> None:
        """See Index.publish. The length alone makes new pages visible, and scores of the page that earlier rows began follow."""
        self.summaries.publish(slot, start)

    def extents_of(self, slot: int, places: int) -> Tensor:
        """Return the numbers of the extents that hold the first places of a slot, int64, on the arrays' device."""
        return self.context.extents.device_table[slot, : -(-places // EXTENT_TOKENS)].long()

    def by_page(self, array: Tensor, slot: int, places: int) -> Tensor:
        """Copy the entries of an array [E, G, P, ...] for the pages that a slot's first places occupy: [G, pages, ...]."""
        return read_pages(self.context, array, slot, -(-places // self.config.page))

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """Select static pages and the best of the others: queries [batch, H, D] to pages int32 [batch, G, top_k / page].

        Pages ascend; -1 fills up when the region holds fewer pages.
        """
        kv_heads, config = self.context.num_kv_heads, self.config
        shape = (batch.size, kv_heads, config.top_k // config.page)
        rows = torch.full(shape, -1, dtype=torch.int32, device=queries.device)
        for request, (slot, length) in enumerate(zip(batch.slots, batch.lengths, strict=True)):
            grouped = queries[request].reshape(kv_heads, -1, queries.shape[-1])
            pages = self._pages(grouped, slot, length)
            rows[request, :, : pages.shape[1]] = pages.int()
            self.recent[slot, self.received[slot] % config.window_queries] = queries[request]
            self.received[slot] += 1
        return Selection(rows, config.page)

    def _pages(self, queries: Tensor, slot: int, length: int) -> Tensor:
        # queries [G, g, D] to ascending pages int64 [G, min(top_k / page, pages)]; counts the pages that are not static
        config = self.config
        static = int(self.static_rows[slot]) // config.page
        scores = self.summaries.scores(queries, slot, length, static)
        values = softmax_mean(scores, self.context.scaling)
        chosen = best_positions(values, config.top_k // config.page - static) + static
        extents = self.context.extents.table[slot].to(chosen.device)[chosen // self.pages_of_extent].long()
        heads = torch.arange(chosen.shape[0], device=chosen.device)[:, None]
        self.picked[extents, heads, chosen % self.pages_of_extent] += 1
        first = torch.arange(static, device=chosen.device).expand(chosen.shape[0], -1)
        return torch.cat((first, chosen), dim=1)

    def refresh(self, slots: Sequence[int]) -> None:
        """See Index.refresh. Chooses a new static set every `update_interval` steps of a slot."""
        for slot in slots:
            if self.count_step(slot):
                self._update(slot)

    def count_step(self, slot: int) -> bool:
        """Count a decode step of a slot that selected rows; returns whether an update of its static set is due after it."""
        self._steps[slot] += 1
        return update_is_due(self.config, self.context.layer, self._steps[slot])

    @torch.inference_mode()
    def _update(self, slot: int) -> None:
        config = self.config
        whole = self.context.lengths[slot] // config.page * config.page
        if config.most_static == 0 or whole == 0:
            return
        places, valid = candidates(config, self.by_page(self.picked, slot, whole), whole)
        most = int(valid.sum(dim=1).max())  # those that count come first
        places, valid = places[:, :most], valid[:, :most]
        keys = self._read_keys(slot, places)
        queries = self.recent[slot].transpose(0, 1)
        values = self.observe(queries, keys, self.context.scaling, valid)
        count = self.targets[slot].clamp(max=whole)
        chosen = largest(values, count, config.most_static)
        leaving, entering = pair_exchange(chosen, places, self.homes[slot].long(), count)
        self._exchange(slot, leaving, entering)
        self.static_rows[slot] = count
        self.picked.index_fill_(0, self.extents_of(slot, whole), 0)

    def _read_keys(self, slot: int, places: Tensor) -> Tensor:
        """Copy the keys of the pool at places [G, m]: [G, m, D]."""
        extents = self.context.extents.table[slot][places // EXTENT_TOKENS].long()
        heads = torch.arange(places.shape[0], device=places.device)[:, None].expand_as(places)
        return self._pool[extents, heads, places % EXTENT_TOKENS, 0]

    @property
    def _pool(self) -> Tensor:
        assert self.context.rows is not None, "an index without rows only tells what memory it takes"
        return self.context.rows.pool

    def _exchange(self, slot: int, leaving: Tensor, entering: Tensor) -> None:
        """Swap pairs of rows in the pool, and let the summaries of their pages follow."""
        pool = self._pool
        for head in range(leaving.shape[0]):
            pairs = leaving[head] >= 0
            first, second = leaving[head, pairs], entering[head, pairs]
            both, swapped = torch.cat((first, second)), torch.cat((second, first))
            extents = self.context.extents.table[slot].long()
            here = (extents[both // EXTENT_TOKENS], head, both % EXTENT_TOKENS)
            there = (extents[swapped // EXTENT_TOKENS], head, swapped % EXTENT_TOKENS)
            for entries in (pool, self.tokens):
                if entries is not None:
                    entries[here] = entries[there]
            self.homes[slot, head, first] = second.int()
            self.summaries.exchange(slot, head, first, second, pool)


def ordered(keys: Tensor, order: Tensor | None) -> Tensor:
    """Put keys [G, n, D] in the order of places: `order` int64 [G, n] is the token of each place; None: token order."""
    return keys if order is None else keys.gather(1, order[..., None].expand_as(keys))


def update_is_due(config: Config, layer: int, steps: int) -> bool:
    """Whether a slot's static set is chosen anew after `steps` decode steps; layers take turns.

    The first update waits until the observation window is full of decode steps' queries. Steps that attended to everything
    record no query, and are not counted: a request that is short all the time is never updated.
    """
    return steps >= config.window_queries and (steps - STAGGER * layer) % config.update_interval == 0
