"""RetrievalAttention: a walk from row to row through a graph that the prompt's queries have drawn."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from kvseek.core.errors import require
from kvseek.core.index_context import IndexContext
from kvseek.plugins.peers.base import KeyedIndex, Region, TopK, all_queries, peer_traits
from kvseek.plugins.ranking import softmax_mean

PAPER = {"top_k": 100, "cache.sink": 128, "cache.local": 512}
BLOCK = 64  # queries whose products with all keys are in memory at a time


@dataclass(frozen=True)
class Config(TopK):
    """How many rows are kept, and how a graph of them is walked.

    Attributes
    ----------
    links : int
        Neighbours of a row in the graph, and nearest rows of a query of which it is made.
    beam : int
        Rows that a round of the walk looks at the neighbours of, and rows that it begins at.
    rounds : int
        Rounds of the walk.
    """

    top_k: int = 100
    links: int = 32
    beam: int = 32
    rounds: int = 6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(value >= 1, field.name, value, ">= 1", f"{field.default} is the default")


class GraphIndex(KeyedIndex):
    """Keeps the neighbours of each row, int32 [links] a row, and the number of rows that have some, int64 [slots].

    The row nearest to a query and the others near it are neighbours. Generated rows have none: every walk begins at them, too.
    """

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.neighbours = self.by_row(self.config.links, torch.int32)
        self.drawn = torch.zeros(context.extents.slots, dtype=torch.int64, device=context.device)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build. The last queries draw the graph of each KV head."""
        super().build(slot, keys, queries)
        heads, n, dim = keys.shape
        self.drawn[slot] = n
        grouped = queries[:, max(0, queries.shape[1] - n) :].reshape(heads, -1, dim).float()
        for head in range(heads if n else 0):
            near = [
                (block @ keys[head].float().T).topk(min(self.config.links, n)).indices
                for block in torch.split(grouped[head], BLOCK)
            ]
            graph = neighbours_of(torch.cat(near), n, self.config.links).int()
            for extent, inside, places in self.context.extents.spans(slot, 0, n):
                self.neighbours[extent, head, inside] = graph[places]

    def values(self, queries: Tensor, region: Region) -> Tensor:
        """Rank the rows that a walk has seen by their mean softmax. It begins at evenly spaced rows."""
        beam = min(self.config.beam, len(region.places))
        scores = (queries @ self.keys(region).transpose(1, 2)).masked_fill(~region.valid, -torch.inf)
        drawn = self.drawn.index_select(0, region.slot)
        read, places = self.read(self.neighbours, region).long(), region.places[:, None]
        neighbours = torch.where(places < drawn, read, places)[:, None].expand(-1, scores.shape[1], -1, -1)
        seen = (region.places >= drawn).expand_as(scores).contiguous()
        entries = torch.arange(beam, device=drawn.device) * drawn // beam
        seen = seen.scatter(2, entries.expand(*scores.shape[:2], -1), True)
        left = torch.ones_like(seen)
        for _ in range(self.config.rounds):
            best = scores.masked_fill(~(seen & left), -torch.inf).topk(beam)
            # Where less than a beam is left, row 0 again, at which every walk begins.
            rows = torch.where(best.values > -torch.inf, best.indices, 0)
            found = neighbours.gather(2, rows[..., None].expand(-1, -1, -1, self.config.links)).flatten(2)
            left, seen = left.scatter(2, rows, False), seen.scatter(2, found, True)
        return softmax_mean(scores.masked_fill(~seen, -torch.inf), self.context.scaling)


def neighbours_of(near: Tensor, n: int, links: int) -> Tensor:
    """Draw a graph of n rows: [n, links], a row itself where it has fewer neighbours.

    Parameters
    ----------
    near : Tensor, int64 [queries, up to links]
        The rows nearest to each query, in their order. The first and each of the others are neighbours; of more than `links` a
        row has those that most queries give it.
    """
    first, others = near[:, :1].expand_as(near[:, 1:]).flatten(), near[:, 1:].flatten()
    edges, counts = torch.cat((first * n + others, others * n + first)).unique(return_counts=True)  # type: ignore[no-untyped-call]
    edges = edges[counts.argsort(descending=True, stable=True)]
    edges = edges[(edges // n).argsort(stable=True)]
    rows = edges // n
    ranks = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    graph = torch.arange(n, device=rows.device)[:, None].repeat(1, links)
    graph[rows[ranks < links], ranks[ranks < links]] = edges[ranks < links] % n
    return graph


traits = partial(peer_traits, prefix_reuse="copies", last_queries=all_queries)
create = GraphIndex
