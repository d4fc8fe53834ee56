"""Retrieval regions of several slots, their row pool and one index of a method: the contract of plugins/contract.py by hand.

The engine's part (prefill, eviction, attention) is played here in a few lines, so that a method can be taken through
thousands of tokens without a model. Every value vector names its slot and token, so that attended rows tell whose they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tests.plugins.index_cases import KV_HEADS, context_of
from torch import Tensor

from kvseek.core.batch import Batch, RequestState, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import LayerRows
from kvseek.kernels.reference.attention.attend import selected_places
from kvseek.plugins.contract import Index
from kvseek.plugins.registry import get_method

GROUP, DIM = 3, 32
HEADS = KV_HEADS * GROUP
UPDATE = 8  # keys that enter a region together, at least
LAYER = 2  # methods may attend densely in the first ones


class Region:
    """`slots` retrieval regions under one index; keys, values and queries are float32 on the CPU."""

    def __init__(
        self,
        method: str,
        settings: Mapping[str, object],
        slots: int = 2,
        max_tokens: int = 4096,
        library: CpuLibrary | None = None,
    ) -> None:
        chosen, per_slot = get_method(method), -(-max_tokens // EXTENT_TOKENS)
        config = chosen.configure({**settings})
        self.extents = ExtentTable(slots, per_slot, slots * per_slot)
        self.lengths = [0] * slots
        self.pool = torch.full((slots * per_slot, KV_HEADS, EXTENT_TOKENS, 2, DIM), torch.nan)
        self.keys = [torch.empty(KV_HEADS, 0, DIM) for _ in range(slots)]  # the truth, by token
        self.context = context_of(
            config,
            DIM,
            GROUP,
            self.extents,
            self.lengths,
            layer=LAYER,
            codebooks=chosen.traits(config).codebooks(DIM),
            library=library,
            rows=LayerRows(self.pool, self.pool.data_ptr(), self.pool.stride(0)),
            update=UPDATE,
            reuses_prefixes=True,
        )
        self.index: Index = chosen.create(self.context)

    def prefill(self, slot: int, keys: Tensor, queries: Tensor, room: int = 0) -> None:
        """Give a slot a prompt: keys [G, n, D], its last queries [H, w, D], room for `room` tokens more."""
        n = keys.shape[1]
        self.extents.release(slot)
        self.extents.reserve(slot, n + room)
        self.lengths[slot], self.keys[slot] = n, keys.clone()
        work = self.index.build(slot, keys, queries)
        if work is not None:
            work.wait()
        self._write(slot, 0, keys)

    def evict(self, slot: int, keys: Tensor) -> None:
        """Append keys [G, u, D] that left the window."""
        start, count = self.lengths[slot], keys.shape[1]
        self._write(slot, start, keys)
        self.keys[slot] = torch.cat([self.keys[slot], keys], dim=1)
        self.index.append(slot, start, keys)
        self.lengths[slot] += count
        self.index.publish(slot, start, count)

    def batch(self, slots: list[int]) -> Batch:
        """A decode step of these slots, none of them dense."""
        budgets = [self.index.budget(self.lengths[slot]) for slot in slots]
        states = [
            RequestState(slot=slot, length=self.lengths[slot], method_fields=budget.method_fields)
            for slot, budget in zip(slots, budgets, strict=True)
        ]
        return Batch.of(states, self.extents.table)

    def step(self, queries: Tensor, slots: list[int]) -> list[list[Tensor]]:
        """Select for queries [batch, H, D], then refresh: the tokens selected, ascending, by request and KV head.

        Checks what every selection must be: entries in range, none twice, as many rows as `budget` says, and rows of the
        slot's own tokens with the keys that belong to them.
        """
        selection = self.index.select(queries, self.batch(slots))
        tokens = [[self._tokens(selection, r, slot, head) for head in range(KV_HEADS)] for r, slot in enumerate(slots)]
        for per_head, slot in zip(tokens, slots, strict=True):
            mean = sum(len(head) for head in per_head) / KV_HEADS
            page = getattr(self.context.config, "page", 1)  # a page that does not fit is left out
            assert 0 <= self.index.budget(self.lengths[slot]).rows - mean < page, "the budget is the rows attended to"
        self.index.refresh(slots)
        return tokens

    def _tokens(self, selection: Selection | None, request: int, slot: int, head: int) -> Tensor:
        n = self.lengths[slot]
        assert selection is None or int(selection.rows[request, head].max()) < n
        places = selected_places(selection, request, head, n)
        rows = self.extents.read(self.pool, slot, n)[head, places]
        owners, tokens = rows[:, 1, 0].long(), rows[:, 1, 1].long()
        assert (owners == slot).all()
        assert tokens.unique().numel() == len(places), "no row twice"
        assert torch.equal(rows[:, 0], self.keys[slot][head, tokens])
        return tokens.sort().values

    def _write(self, slot: int, start: int, keys: Tensor) -> None:
        values = torch.zeros_like(keys)
        values[..., 0], values[..., 1] = slot, torch.arange(start, start + keys.shape[1]).float()
        self.extents.write(self.pool, slot, start, torch.stack((keys, values), dim=2))

    def mass(self, queries: Tensor, slot: int, tokens: list[Tensor]) -> float:
        """Share of the softmax mass of queries [H, D] over a slot's keys that `tokens` of each KV head hold; mean."""
        scores = queries.view(KV_HEADS, GROUP, DIM) @ self.keys[slot].transpose(1, 2) * DIM**-0.5
        weights = scores.softmax(dim=-1)
        return float(torch.stack([weights[head][:, tokens[head]].sum(-1).mean() for head in range(KV_HEADS)]).mean())


def topical(count: int, seed: int, run: int = 16, topics: int = 12, strength: float = 5.0) -> tuple[Tensor, Tensor]:
    """Keys [G, count, D] in runs of `run` tokens of a topic, and queries [count, H, D] that look for the topic of their token."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(topics, DIM, generator=generator), dim=-1)
    topic = torch.randint(topics, (-(-count // run),), generator=generator).repeat_interleave(run)[:count]
    noise = torch.randn(KV_HEADS, count, DIM, generator=generator)
    keys = strength * directions[topic] + noise
    queries = strength * directions[topic][:, None] + 0.5 * torch.randn(count, HEADS, DIM, generator=generator)
    return keys, queries
