"""PRKV in PyTorch, on any device: the definition of correct for the GPU kernels.

Every step attends to the rows that the last queries attended to most, the static set. Tokens form pages, of which a step chooses
the best by what it knows of the keys in them that are not static (summaries.py). PRKV paper, section 4. No row ever moves: the
static set is a list of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.extents import extents_for
from kvseek.core.index_context import IndexContext
from kvseek.plugins.contract import Budget, Index
from kvseek.plugins.ranking import softmax_mean

from .config import Config
from .static import candidates, choose, observation_scores
from .summaries import Boxes, Codes, Summaries, read_pages

STAGGER = 4  # decode steps between the updates of neighbouring layers, so that no step has to publish them all


class ReferenceIndex(Index):
    """One layer's pages and static sets, in extents of 1,024 tokens.

    With E extents, G KV heads, P pages an extent, S the most static rows and w queries that choose a static set anew:

    Attributes
    ----------
    summaries : Summaries
        What pages are scored by.
    picked : Tensor, int32 [E, G, P]
        How often a page was selected since the last update.
    static : Tensor, int32 [slots, G, S]
        Static tokens of each KV head, ascending; as many as `static_rows` says.
    static_rows : Tensor, int32 [slots]
        Number of static tokens of each KV head: those of whole pages.
    counts : list of int
        The same, known to the host.
    recent : Tensor [slots, w, H, D]
        The queries of the last steps, in any order.
    received : array of int64
        Queries that `recent` has received from the steps of each slot since its prompt.
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
        tokens = (slots, context.num_kv_heads, config.most_static)
        self.static = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.static_rows = torch.zeros(slots, dtype=torch.int32, device=device)
        self.counts = [0] * slots
        recent = (slots, config.update_queries, context.num_heads, context.head_dim)
        self.recent = torch.zeros(recent, dtype=context.dtype, device=device)
        self.received = array("q", [0] * slots)
        self._steps = [0] * slots  # decode steps since the prompt

    @property
    def bytes_per_token(self) -> float:
        """Bytes of summaries and counts, of all KV heads; static sets and queries do not grow."""
        counts = self.context.num_kv_heads * self.picked.itemsize / self.config.page
        return self.summaries.bytes_per_token + counts

    def budget(self, length: int) -> Budget:
        """See Index.budget. The rows are the budget: static rows and rows of pages. The kernels need no fields."""
        return Budget(min(self.config.top_k, length))

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build. Reads nothing back from a device."""
        self.received[slot] = self._steps[slot] = 0
        self.picked.index_fill_(0, self._extents_of(slot, keys.shape[1]), 0)
        whole = self.whole(keys.shape[1])
        count = self.static_count(whole)
        static = torch.empty((keys.shape[0], 0), dtype=torch.int64, device=keys.device)
        if count:
            values = self.observe(queries[:, -self.config.window_queries :], keys[:, :whole], self.context.scaling)
            static = choose(values, torch.arange(whole, device=keys.device).expand_as(values), count)
        self.set_static(slot, static)
        self.summaries.build(slot, keys, static)

    def static_count(self, length: int) -> int:
        """Return how many rows of a region of `length` are static when they are chosen: as many as fit in whole pages."""
        return min(self.config.most_static, self.whole(length))

    def whole(self, length: int) -> int:
        """Return the number of tokens in whole pages of a region: the last page may still grow."""
        return length // self.config.page * self.config.page

    def set_static(self, slot: int, static: Tensor) -> None:
        """Make these tokens, int64 [G, s], the static set of a slot."""
        self.counts[slot] = static.shape[1]
        self.static[slot, :, : static.shape[1]] = static.int()
        self.static_rows[slot : slot + 1].fill_(static.shape[1])  # an assignment of a number would wait for the device

    def static_of(self, slot: int) -> Tensor:
        """Copy the static tokens of a slot: int64 [G, s], ascending."""
        return self.static[slot, :, : self.counts[slot]].long()

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. New rows fill up the last page, then new pages; no page of a new extent has been selected."""
        first, stop = extents_for(start), extents_for(start + keys.shape[1])
        if first < stop:
            self.picked.index_fill_(0, self.context.extents.device_table[slot, first:stop].long(), 0)
        self.summaries.append(slot, start, keys)

    def publish(self, slot: int, start: int, count: int) -> None:
        """See Index.publish. The length alone makes new pages visible, and scores of the page that earlier rows began follow."""
        self.summaries.publish(slot, start)

    def _extents_of(self, slot: int, tokens: int) -> Tensor:
        """Return the numbers of the extents that hold the first tokens of a slot, int64, on the arrays' device."""
        return self.context.extents.device_table[slot, : extents_for(tokens)].long()

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """Select static rows and those of the best pages: queries [batch, H, D] to rows int32 [batch, G, top_k].

        Pages are ranked, ties by their numbers, and taken until the rows of the next one that are not static do not fit into what
        is left of `top_k`: no more than `top_k / page`. Static rows come first, both parts ascend, and -1 fills up.
        """
        rows = [
            self._rows(queries[request], slot, length)
            for request, (slot, length) in enumerate(zip(batch.slots, batch.lengths, strict=True))
        ]
        for request, slot in enumerate(batch.slots):
            self.recent[slot, self.received[slot] % self.config.update_queries] = queries[request]
            self.received[slot] += 1
        return Selection(torch.stack(rows))

    def _rows(self, queries: Tensor, slot: int, length: int) -> Tensor:
        # queries [H, D] to rows int32 [G, top_k]; counts the pages taken
        static = self.static_of(slot)
        values, tokens = self.page_values(queries, slot, length), self.summaries.tokens(static, length)
        taken = self.best_pages(values, tokens, static.shape[1])
        self._count(taken, slot, self.summaries.first_page(static.shape[1]))
        rows = torch.cat((static, tokens.masked_fill(~taken[..., None], -1).flatten(1)), dim=1)
        rows = F.pad(rows, (0, max(0, self.config.top_k - rows.shape[1])), value=-1)
        return rows.gather(1, (rows < 0).int().argsort(dim=1, stable=True))[:, : self.config.top_k].int()

    def best_pages(self, values: Tensor, tokens: Tensor, static: int) -> Tensor:
        """Mark the pages that are taken beside `static` rows: bool [G, pages].

        Parameters
        ----------
        values : Tensor [G, pages]
            What ranks the pages.
        tokens : Tensor, int64 [G, pages, page]
            Their tokens, of Summaries.tokens.
        """
        free = (tokens >= 0).sum(dim=-1)
        ranked = values.argsort(dim=1, descending=True, stable=True)
        fits = free.gather(1, ranked).cumsum(dim=1) <= self.config.top_k - static
        return torch.zeros_like(free, dtype=torch.bool).scatter_(1, ranked, fits) & (free > 0)

    def page_values(self, queries: Tensor, slot: int, length: int) -> Tensor:
        """Compute what ranks the pages of a region for queries [H, D], from the first page on: [G, pages]."""
        grouped = queries.reshape(self.context.num_kv_heads, -1, queries.shape[-1])
        scores = self.summaries.scores(grouped, slot, self.static_of(slot), length)
        return softmax_mean(scores, self.context.scaling)

    def _count(self, taken: Tensor, slot: int, first: int) -> None:
        """Count the pages taken, bool [G, pages], which begin with page `first`."""
        heads, pages = taken.nonzero(as_tuple=True)
        pages = pages + first
        extents = self.context.extents.device_table[slot].long()[pages // self.pages_of_extent]
        self.picked[extents, heads, pages % self.pages_of_extent] += 1

    def refresh(self, slots: Sequence[int]) -> None:
        """See Index.refresh. Chooses a new static set every `update_interval` steps of a slot."""
        for slot in slots:
            if self.count_step(slot):
                self._update(slot)

    def count_step(self, slot: int) -> bool:
        """Count a decode step of a slot that selected rows; returns whether an update of its static set is due after it."""
        self._steps[slot] += 1
        return update_is_due(self.config, self.context.layer, self._steps[slot])

    def take_picked(self, slot: int, whole: int) -> Tensor:
        """Take the counts of the pages of a slot's first `whole` tokens, which begin anew: int32 [G, pages]."""
        picked = read_pages(self.context, self.picked, slot, whole // self.config.page)
        self.picked.index_fill_(0, self._extents_of(slot, whole), 0)
        return picked

    def candidates(self, static: Tensor, picked: Tensor, whole: int) -> tuple[Tensor, Tensor]:
        """List the tokens that may be static from now on, int64 [G, m], and how many of them count, int64 [G]; they come first.

        With boxes these are all, in their order: all pages change with the static set, so all keys are read anyway.
        """
        if self.config.page_score == "codes":
            return candidates(static, picked, self.config.page, self.config.update_pages)
        heads = static.shape[0]
        every = torch.arange(whole, device=static.device).expand(heads, -1)
        return every, torch.full((heads,), whole, device=static.device)

    @torch.inference_mode()
    def _update(self, slot: int) -> None:
        whole = self.whole(self.context.lengths[slot])
        count, old = self.static_count(whole), self.static_of(slot)
        if count == 0:
            return
        tokens, counts = self.candidates(old, self.take_picked(slot, whole), whole)
        tokens = tokens[:, : max(count, int(counts.max()))]
        keys = self._read_keys(slot, tokens)
        valid = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        values = self.observe(self.recent[slot].transpose(0, 1), keys, self.context.scaling, valid)
        static = choose(values, tokens, count)
        self.summaries.renew(slot, old, static, self.summaries.prepare(keys, static))
        self.set_static(slot, static)

    def _read_keys(self, slot: int, tokens: Tensor) -> Tensor:
        """Copy the keys of the pool of tokens [G, m]: [G, m, D]."""
        assert self.context.rows is not None, "an index without rows only tells what memory it takes"
        extents = self.context.extents.table[slot][tokens // EXTENT_TOKENS].long()
        heads = torch.arange(tokens.shape[0], device=tokens.device)[:, None].expand_as(tokens)
        return self.context.rows.pool[extents, heads, tokens % EXTENT_TOKENS, 0]


def update_is_due(config: Config, layer: int, steps: int) -> bool:
    """Whether a slot's static set is chosen anew after `steps` decode steps; layers take turns.

    The first update waits until there are enough queries of decode steps. Steps that attended to everything record no query, and
    are not counted: a request that is short all the time is never updated.
    """
    return steps >= config.update_queries and (steps - STAGGER * layer) % config.update_interval == 0
