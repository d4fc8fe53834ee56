"""CTkvr in PyTorch, on any device: the definition of correct for the native and GPU kernels.

The last queries of the prompt are centroids; each keeps a list of the places that it attends to most. A query recalls the
lists of the centroids nearest to it, scores the recalled keys exactly, and keeps the best (CTkvr paper, section 3). With
`execution = "codes"` the scores are estimates from nested key codes (kernels/reference/codes) instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import KernelError
from kvseek.core.index_context import IndexContext
from kvseek.kernels.reference.codes.key_codes import estimate_at, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.plugins.ranking import RankedIndex, code_store

from .build import attention_values, build_lists, cosines, largest, log_weights, make_centroids, prompt_means
from .config import Config


class ReferenceIndex(RankedIndex):
    """One layer's centroids and their lists. Each slot has a ring of centroids, in which new ones replace the oldest.

    Attributes
    ----------
    ring, width, capacity : int
        Most centroids of a slot, most places of a list, most places that a query recalls (Config).
    centroids : Tensor [slots, H, ring, D], in the engine's dtype
        Queries less their prompt's mean, divided by their norms (build.py).
    means : Tensor, float32 [slots, H, D]
        Mean of the prompt's centroid queries, kept until the next prompt; zeros without `Config.centred`.
    offsets : Tensor, float32 [slots, H, ring]
        Products of the stored centroids with the mean.
    lists : Tensor, int32 [slots, G, ring, width]
        Places of each centroid, best first; -1 fills up.
    written : list of int
        Number of centroids that each slot ever received: the next goes to `written % ring`, and the first `written` (at most
        `ring`) entries are valid.
    prompted : list of int
        Number of centroids of each slot's prompt, which are the first that were written.
    listed : array of int32
        Number of retrieval tokens of each slot's prompt. Later places are *unlisted*: no list of the prompt holds them.
    codes : CodeStore or None
        Codes of the keys, with execution "codes".
    """

    config: Config

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        most_tokens = context.extents.max_extents * EXTENT_TOKENS
        self.ring, self.width = self.config.centroids, self.config.list_width(most_tokens)
        self.capacity = self.config.recall_capacity(most_tokens)
        slots, heads, kv_heads = context.extents.slots, context.num_heads, context.num_kv_heads
        shape = (slots, heads, self.ring, context.head_dim)
        self.centroids = torch.empty(shape, dtype=context.dtype, device=context.device)
        self.means = torch.zeros((slots, heads, context.head_dim), device=context.device)
        self.offsets = torch.empty(shape[:3], device=context.device)
        self.lists = torch.empty((slots, kv_heads, self.ring, self.width), dtype=torch.int32, device=context.device)
        self.written, self.prompted, self.listed = [0] * slots, [0] * slots, array("i", [0] * slots)
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}  # slot: query [H, D], best places [G, width]
        bits = self.config.bits
        self.codes = code_store(context, bits) if bits else None

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the codes, if there are any; centroids, means, offsets and lists are allocated per slot and not per token."""
        return self.codes.bytes_per_token if self.codes else 0.0

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build. The last queries become centroids, oldest first."""
        self._pending.pop(slot, None)
        n = keys.shape[1]
        last = self.take_prompt(slot, n, queries)
        count = last.shape[1]
        self.make_lists(last, keys, self.lists[slot, :, :count])
        self.written[slot], self.prompted[slot], self.listed[slot] = count, count, n
        if self.codes:
            self.codes.append(slot, 0, keys)

    def make_lists(self, queries: Tensor, keys: Tensor, lists: Tensor) -> None:
        """Write the lists int32 [G, C, width] of a prompt's centroids: queries [H, C, D] and keys [G, n, D] (build_lists)."""
        lists.copy_(build_lists(queries, keys, self.width, self.context.scaling))

    def take_prompt(self, slot: int, tokens: int, queries: Tensor) -> Tensor:
        """Make the last of a prompt's queries [H, w, D], oldest first, a slot's first centroids; lists are not written.

        Returns
        -------
        Tensor [H, count, D]
            The queries that became centroids: as many as `tokens` retrieval tokens get, and at most as the ring has room for.

        Raises
        ------
        KernelError
            If there are tokens, but no query is known.
        """
        known = queries.shape[1]
        if tokens and known == 0:
            raise KernelError(
                f"queries: 0 for {tokens} retrieval keys: must be at least 1; pass the prompt's last queries"
            )
        last = queries[:, known - min(self.ring, self.config.prompt_centroids(tokens, known)) :]
        self.means[slot] = prompt_means(last, self.config.centred)
        self._write_centroids(slot, 0, last)
        return last

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Index.append. New places are recalled as unlisted places, by their number alone; only codes are written."""
        if self.codes:
            self.codes.append(slot, start, keys)

    def refresh(self, slots: Sequence[int]) -> None:
        """Replace the slots' oldest centroids by their last queries (algorithm 2, part d)."""
        for slot in slots:
            if slot in self._pending:
                query, best = self._pending.pop(slot)
                oldest = self.written[slot] % self.ring
                self._write_centroids(slot, oldest, query[:, None])
                self.lists[slot, :, oldest] = best
                self.written[slot] += 1

    def best(self, queries: Tensor, slot: int, length: int) -> Tensor:
        """See RankedIndex.best. Queries over a region that is selected whole become no centroids."""
        query = queries.flatten(0, 1)
        rows, best = self.rerank(query, slot, self.recall(query, slot))
        self.remember(slot, query, best)
        return rows

    def probe(self, query: Tensor, slot: int) -> Tensor:
        """Choose the centroids whose lists a query [H, D] recalls: int64 [G, at most probes], none twice.

        First come the nearest `Config.prompt_probes` of the prompt's centroids that the ring still holds, then the nearest of
        all others; ties by lowest number. A centroid's nearness is the largest cosine over the group's heads, each with its own
        head's centroid.
        """
        valid = min(self.written[slot], self.ring)
        stored, offsets = self.centroids[slot, :, :valid], self.offsets[slot, :, :valid]
        by_head = cosines(query, stored, self.means[slot], offsets)
        nearest = by_head.view(self.context.num_kv_heads, self.context.group_size, valid).amax(dim=1)
        oldest = max(0, self.written[slot] - self.ring)
        of_prompt = nearest[:, oldest : self.prompted[slot]]  # empty once all of the prompt have been replaced
        kept = largest(of_prompt, min(self.config.prompt_probes, of_prompt.shape[1])) + oldest
        others = nearest.scatter(1, kept, -torch.inf)
        return torch.cat((kept, largest(others, min(self.config.probes, valid) - kept.shape[1])), dim=1)

    def recall(self, query: Tensor, slot: int) -> Tensor:
        """Recall the candidates for a query [H, D]: int32 [G, capacity], ascending, no place twice, -1 fills up.

        They are the places of the nearest centroids' lists, and the newest `recent` of the unlisted places.
        """
        n, kv_heads = self.context.lengths[slot], self.context.num_kv_heads
        probed = self.probe(query, slot)[..., None].expand(-1, -1, self.width)
        listed = self.lists[slot].gather(1, probed).flatten(1)
        unlisted = torch.arange(self.first_recent(slot), n, dtype=torch.int32, device=query.device)
        recalled = torch.full((kv_heads, self.capacity), -1, dtype=torch.int32, device=query.device)
        for head in range(kv_heads):
            places = torch.cat((listed[head], unlisted)).unique()  # type: ignore[no-untyped-call]
            places = places[places >= 0]
            recalled[head, : places.shape[0]] = places
        return recalled

    def first_recent(self, slot: int) -> int:
        """Return the first of the recent places, which every query recalls; they reach to the end of the region."""
        return max(self.listed[slot], self.context.lengths[slot] - self.config.recent)

    def rerank(self, query: Tensor, slot: int, recalled: Tensor) -> tuple[Tensor, Tensor]:
        """Order candidates by attention (algorithm 2, part c): exact, or as codes estimate it.

        A key's value is its largest softmax weight among the candidates over the heads of the group; ties by lowest place.

        Parameters
        ----------
        query : Tensor [H, D]
        recalled : Tensor, int32 [G, capacity]
            At least top_k candidates per KV head, ascending, -1 behind them.

        Returns
        -------
        rows : Tensor, int32 [G, top_k]
            The places of the best top_k keys, ascending.
        best : Tensor, int32 [G, width]
            The places of the best `width` keys, best first; -1 fills up.
        """
        values = torch.full(recalled.shape, -torch.inf, device=query.device)
        for head, found in enumerate(self.values(query, slot, recalled)):
            values[head, : found.shape[0]] = found
        order = largest(values, max(self.config.top_k, self.width))
        best = recalled.gather(1, order)
        return best[:, : self.config.top_k].sort(dim=1).values, best[:, : self.width]

    def values(self, query: Tensor, slot: int, recalled: Tensor) -> list[Tensor]:
        """Compute what `rerank` orders candidates by, for each KV head float32 [count] of the `count` that are not -1."""
        grouped = query.view(self.context.num_kv_heads, -1, query.shape[-1])
        counts, scaling = (recalled >= 0).sum(dim=1).tolist(), self.context.scaling
        if self.codes is None:
            keys = self._keys(slot, recalled)
            return [
                attention_values(grouped[head, :, None], keys[head, :count], scaling)[0]
                for head, count in enumerate(counts)
            ]
        codes = self.codes.read(slot, self.context.lengths[slot])
        lanes = round_lanes(rotate(grouped, self.codes.signs))
        scores = estimate_at(codes, recalled.long().clamp(min=0), lanes) * scaling
        return [log_weights(scores[head, :, :count]) for head, count in enumerate(counts)]

    def remember(self, slot: int, query: Tensor, best: Tensor) -> None:
        """Keep a query [H, D] and its best places int32 [G, width] for `refresh`, if centroids are updated."""
        if self.config.update:
            self._pending[slot] = (query.clone(), best.clone())

    def _write_centroids(self, slot: int, first: int, queries: Tensor) -> None:
        """Write queries [H, C, D] as centroids to the ring, from entry `first` on."""
        taken = slice(first, first + queries.shape[1])
        made = make_centroids(queries, self.means[slot], self.context.dtype)
        self.centroids[slot, :, taken], self.offsets[slot, :, taken] = made

    def _keys(self, slot: int, places: Tensor) -> Tensor:
        """Read the keys of places [G, c] (-1: any key) from the row pool, float32 [G, c, D] on the places' device."""
        assert self.context.rows is not None, "the rows are placed before anything is built"
        pool = self.context.rows.pool
        inside = places.long().clamp(min=0).to(pool.device)
        extents = self.context.extents.table[slot].long().to(pool.device)[inside // EXTENT_TOKENS]
        heads = torch.arange(places.shape[0], device=pool.device)[:, None]
        return pool[extents, heads, inside % EXTENT_TOKENS, 0].to(places.device).float()
