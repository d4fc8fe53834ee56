"""Exact top k, and how the query heads of a KV head agree on one ranking."""

from __future__ import annotations

import torch
from tests.plugins.index_cases import (
    KV_HEADS,
    extend,
    make_context,
    make_flat,
    random_keys,
    random_queries,
    select_rows,
)

from kvseek.plugins.flat import method as flat_method
from kvseek.plugins.flat.method import FlatIndex
from kvseek.plugins.ranking import best_positions


class TestFlat:
    def test_heads_of_a_group_agree_by_the_mean_of_their_softmax(self) -> None:
        keys, queries = random_keys(1500, 64), random_queries(1, KV_HEADS * 3, 64)
        rows = select_rows(make_flat(50, keys, 3), queries, [0]).rows
        for head in range(KV_HEADS):
            weights = (queries[0, head * 3 : head * 3 + 3] @ keys[head].T / 8).softmax(dim=-1)
            assert rows[0, head].tolist() == weights.mean(dim=0).topk(50).indices.sort().values.tolist()

    def test_grows_across_extents(self) -> None:
        keys, queries = random_keys(1400, 64), random_queries(1, KV_HEADS, 64)
        index = FlatIndex(make_context(flat_method.Config(), 64, 1, [1400]))
        index.context.lengths[0] = 1000
        index.build(0, keys[:, :1000], torch.empty(0))
        extend(index, 0, keys[:, 1000:])
        assert torch.equal(
            select_rows(index, queries, [0]).rows,
            select_rows(make_flat(100, keys, 1), queries, [0]).rows,
        )

    def test_ties_go_to_the_lowest_position(self) -> None:
        assert best_positions(torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]]), 3).tolist() == [[0, 1, 4]]
