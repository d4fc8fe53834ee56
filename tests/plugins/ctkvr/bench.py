"""A CTkvr index over given keys, for tests of its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.index_cases import KV_HEADS, extend, make_context, random_keys, random_queries, select_rows
from torch import Tensor

from kvseek.core.index_context import IndexContext, LayerRows
from kvseek.kernels.reference.codes.rotation import padded_dim, rotation_signs
from kvseek.plugins.ctkvr.build import attention_values, largest
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.reference import ReferenceIndex

DIM, GROUP = 32, 3
SMALL = Config(top_k=20, recent=24, probes=3, **BY_KEYS)  # lists of 50


class Bench:
    """An index whose slots hold given keys, rows in shuffled extents of which no other place is finite."""

    def __init__(self, config: Config, keys: Sequence[Tensor], room: int = 0, group: int = GROUP) -> None:
        lengths = [part.shape[1] for part in keys]
        self.pool = torch.full((16, KV_HEADS, 1024, 2, keys[0].shape[2]), torch.nan)
        rows = LayerRows(self.pool, self.pool.data_ptr(), self.pool.stride(0))
        context = make_context(config, keys[0].shape[2], group, lengths, extents=16)
        books = {"signs": rotation_signs(0, padded_dim(keys[0].shape[2]))}
        self.context: IndexContext = replace(context, rows=rows, codebooks=books)
        for slot in reversed(range(len(keys))):
            self.context.extents.reserve(slot, lengths[slot] + room)
        self.index = ReferenceIndex(self.context)
        self.prompts: dict[int, Tensor] = {}  # queries that a slot was built with
        for slot, part in enumerate(keys):
            self.write(slot, 0, part)

    def write(self, slot: int, start: int, keys: Tensor) -> None:
        self.context.extents.write(self.pool, slot, start, torch.stack((keys, keys), dim=2))

    def keys(self, slot: int) -> Tensor:
        return self.context.extents.read(self.pool, slot, self.context.lengths[slot])[:, :, 0]

    def build(self, slot: int, queries: Tensor) -> None:
        self.prompts[slot] = queries
        self.index.build(slot, self.keys(slot), queries)

    def grow(self, slot: int, keys: Tensor) -> None:
        self.write(slot, self.context.lengths[slot], keys)
        extend(self.index, slot, keys)

    def step(self, query: Tensor, slot: int = 0) -> Tensor:
        rows = select_rows(self.index, query[None], [slot]).rows[0]
        self.index.refresh([slot])
        return rows


def head_queries(count: int, seed: int) -> Tensor:
    """Queries [H, count, D] that have, as real ones do, a large part in common: per head, in some heads larger."""
    heads = KV_HEADS * GROUP
    common = random_queries(heads, 1, DIM, seed=99) * torch.linspace(0.5, 4, heads)[:, None, None]
    return random_queries(heads, count, DIM, seed) + common


def one_query(seed: int) -> Tensor:
    """A query [H, D] of a step."""
    return head_queries(1, seed)[:, 0]


def make(config: Config, lengths: Sequence[int], room: int = 0, queries: int = 300) -> Bench:
    bench = Bench(config, [random_keys(n, DIM, seed=slot) for slot, n in enumerate(lengths)], room)
    for slot in range(len(lengths)):
        bench.build(slot, head_queries(queries, seed=10 + slot))
    return bench


def centroids_of(queries: Tensor, means: Tensor) -> Tensor:
    """Centroids [H, C, D] of queries [H, C, D] whose prompt has the means [H, D], by their definition."""
    return torch.nn.functional.normalize(queries.double() - means[:, None].double(), dim=-1).float()


def exact_rows(query: Tensor, keys: Tensor, count: int) -> Tensor:
    """Best places of a query [H, D] over keys [G, n, D] by CTkvr's value, ascending."""
    grouped = query.view(keys.shape[0], -1, 1, query.shape[-1])
    return largest(attention_values(grouped, keys, query.shape[-1] ** -0.5)[:, 0], count).sort(dim=1).values
