"""The rows that the nested method's PyTorch reference selects: its definition in plain loops, and its laws."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.index_cases import (
    KV_HEADS,
    check_definition,
    context_of,
    random_keys,
    random_queries,
    select_rows,
    shared_with_exact,
)
from torch import Tensor

from kvseek.core.extents import ExtentTable, extents_for
from kvseek.kernels.reference.codes.key_codes import STEPS, leading_bits, mean_integers
from kvseek.kernels.reference.codes.rotation import padded_dim, rotate, rotation_signs
from kvseek.plugins.nested.config import Config
from kvseek.plugins.nested.reference import ReferenceIndex


def make_index(config: Config, head_dim: int, group: int, keys: Tensor, room: int = 0) -> ReferenceIndex:
    n = keys.shape[1]
    table = ExtentTable(1, extents_for(n + room), extents_for(n + room))
    table.reserve(0, n + room)
    books = {"signs": rotation_signs(config.rotation_seed, padded_dim(head_dim))}
    index = ReferenceIndex(context_of(config, head_dim, group, table, [n], codebooks=books))
    index.build(0, keys, torch.empty(0))
    return index


def select_by_hand(index: ReferenceIndex, query: Tensor, head: int) -> list[int]:
    """Both passes for the queries [g, D] of one KV head (plugins/nested/README.md), in float64."""
    config, n = index.config, index.context.lengths[0]
    codes = index.codes.read(0, n)
    scales = codes.scales[head].double()
    means = mean_integers(codes.means[head]).double() * codes.mean_steps[head].double()[:, None]
    lanes = rotate(query, index.codes.signs)
    lanes = torch.stack([(lane * (127 / lane.abs().max())).round() * lane.abs().max() / 127 for lane in lanes]).double()

    def estimates(bits: int) -> Tensor:
        values = STEPS[4] * 2 ** (4 - bits) * (leading_bits(codes, bits)[head].double() - (2**bits - 1) / 2)
        return lanes @ (values * scales[:, None] + means).T

    scores = ((estimates(2) - lanes @ means[:1].T) / lanes.norm(dim=1, keepdim=True)).max(dim=0).values.tolist()
    places = sorted(sorted(range(n), key=lambda i: (-scores[i], i))[: config.candidates * config.top_k])
    values = (estimates(4)[:, places] * index.context.scaling).softmax(dim=-1).mean(dim=0)
    kept = sorted(range(len(places)), key=lambda i: (-float(values[i]), i))[: config.top_k]
    return sorted(places[i] for i in kept)


@pytest.mark.parametrize(("head_dim", "group", "n"), [(64, 3, 700), (80, 2, 1100), (16, 1, 300)])
def test_selection_equals_the_definition(head_dim: int, group: int, n: int) -> None:
    index = make_index(Config(top_k=23, candidates=4), head_dim, group, random_keys(n, head_dim))
    check_definition(index, select_by_hand, head_dim, group)


def test_a_common_offset_of_all_keys_changes_nothing() -> None:
    """Because the mean is subtracted. The offset is a power of two, so that keys and mean are rounded alike."""
    keys, queries = random_keys(900, 64).round(decimals=2), random_queries(1, KV_HEADS * 3, 64)
    rows = [select_rows(make_index(Config(top_k=20), 64, 3, k), queries, [0]).rows[0] for k in (keys, keys + 64)]
    same = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*rows, strict=True)]
    assert min(same) >= 19  # of 20: rounding may swap keys at the cut


def test_finds_most_of_the_exact_top_k() -> None:
    assert shared_with_exact(lambda keys: make_index(Config(), 64, 2, keys)) > 85


def test_bytes_per_token() -> None:
    for head_dim, expected in ((64, 34 + 132 / 256), (128, 66 + 260 / 256)):
        assert make_index(Config(), head_dim, 1, random_keys(1, head_dim)).bytes_per_token == KV_HEADS * expected


def test_candidates_are_so_many_a_row() -> None:
    assert [Config().candidate_count(n) for n in (0, 350, 800, 100_000)] == [0, 350, 800, 800]
