"""Exact top k, and how the query heads of a KV head agree on one ranking."""

from __future__ import annotations

import pytest
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

from kvseek.plugins.flat import config as flat_config
from kvseek.plugins.flat.method import FlatIndex
from kvseek.plugins.shared.group import GROUP_REDUCTIONS, best_positions, query_lanes, reduce_scores


class TestFlat:
    def test_mean_is_top_k_of_the_averaged_query(self) -> None:
        keys, queries = random_keys(1500, 64), random_queries(1, KV_HEADS * 3, 64)
        rows = select_rows(make_flat(50, "mean", keys, 3), queries, [0]).rows
        for head in range(KV_HEADS):
            scores = keys[head] @ queries[0, head * 3 : head * 3 + 3].mean(dim=0)
            assert rows[0, head].tolist() == scores.topk(50).indices.sort().values.tolist()

    @pytest.mark.parametrize(("group_reduce", "reduce"), [("max", "amax"), ("softmax_mean", "mean")])
    def test_others_reduce_the_softmax(self, group_reduce: str, reduce: str) -> None:
        keys, queries = random_keys(1500, 64), random_queries(1, KV_HEADS * 3, 64)
        rows = select_rows(make_flat(50, group_reduce, keys, 3), queries, [0]).rows
        for head in range(KV_HEADS):
            weights = (queries[0, head * 3 : head * 3 + 3] @ keys[head].T / 8).softmax(dim=-1)
            values = getattr(weights, reduce)(dim=0)
            assert rows[0, head].tolist() == values.topk(50).indices.sort().values.tolist()

    def test_grows_across_extents(self) -> None:
        keys, queries = random_keys(1400, 64), random_queries(1, KV_HEADS, 64)
        index = FlatIndex(make_context(flat_config.Config(), 64, 1, [1400]))
        index.context.lengths[0] = 1000
        index.build(0, keys[:, :1000], torch.empty(0))
        extend(index, 0, keys[:, 1000:])
        assert torch.equal(
            select_rows(index, queries, [0]).rows,
            select_rows(make_flat(100, "softmax_mean", keys, 1), queries, [0]).rows,
        )


class TestGroup:
    def test_one_head_is_the_same_under_every_reduction(self) -> None:
        queries, keys = torch.randn(KV_HEADS, 1, 16), torch.randn(KV_HEADS, 200, 16)
        chosen = [
            best_positions(reduce_scores(query_lanes(queries, name) @ keys.transpose(1, 2), name, 0.25), 10)
            for name in GROUP_REDUCTIONS
        ]
        assert torch.equal(chosen[0], chosen[1])
        assert torch.equal(chosen[1], chosen[2])

    def test_ties_go_to_the_lowest_position(self) -> None:
        assert best_positions(torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]]), 3).tolist() == [[0, 1, 4]]
