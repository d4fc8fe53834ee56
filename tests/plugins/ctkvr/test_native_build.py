"""CTkvr's lists on the CPU: compiled kernels at every instruction level against the definition in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.plugins.index_cases import make_context
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.plugins.ctkvr.build import build_lists, log_weights
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.native import NativeIndex, write_lists

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = 3e-5  # of values, relative to the largest score: float32 sums, of exact products for 16 bits


def numbers(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def written(library: CpuLibrary, queries: Tensor, keys: Tensor, rho: int, scaling: float) -> Tensor:
    lists = torch.full((keys.shape[0], queries.shape[1], rho), -7, dtype=torch.int32)
    write_lists(library, queries, keys, lists, scaling)
    return lists


def check_lists(lists: Tensor, queries: Tensor, keys: Tensor, scaling: float) -> None:
    """Each list ascends, is full, and no key outside of it is better than one inside by more than rounding."""
    kv_heads, n, dim = keys.shape
    assert (lists.diff(dim=-1) > 0).all()
    assert lists.min() >= 0
    assert lists.max() < n
    for head, grouped in enumerate(queries.double().view(kv_heads, -1, queries.shape[1], dim)):
        scores = (grouped @ keys[head].double().T) * scaling
        values = log_weights(scores, group=0)
        listed = torch.zeros_like(values, dtype=torch.bool).scatter(1, lists[head].long(), True)
        worst_inside = values.masked_fill(~listed, torch.inf).amin(dim=1)
        best_outside = values.masked_fill(listed, -torch.inf).amax(dim=1)
        assert (best_outside - worst_inside).max() <= TOLERANCE * max(1.0, float(scores.abs().max()))


@pytest.mark.parametrize(
    ("group", "dim", "tokens", "rho", "centroids"),
    [
        (3, 64, 1001, 100, 70),  # tiles of 32 centroids and a rest
        (1, 32, 65, 64, 97),
        (16, 32, 300, 7, 13),
        (7, 160, 129, 1, 5),
        (4, 128, 2500, 320, 9),  # enough keys for a sample
        (5, 96, 4099, 1280, 2),
        (2, 256, 777, 50, 3),
        (1, 64, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lists_hold_the_best_keys(
    library: CpuLibrary, level: int, dtype: torch.dtype, group: int, dim: int, tokens: int, rho: int, centroids: int
) -> None:
    queries = numbers(2 * group, centroids, dim, dtype=dtype, scale=2.0)
    keys, scaling = numbers(2, tokens, dim, dtype=dtype), dim**-0.5
    check_lists(written(library, queries, keys, rho, scaling), queries, keys, scaling)


@pytest.mark.parametrize("tokens", [0, 1, 39, 40])
def test_short_regions_are_listed_whole(library: CpuLibrary, level: int, tokens: int) -> None:
    lists = written(library, numbers(6, 3, 32), numbers(2, tokens, 32), 40, 1.0)
    assert lists.tolist() == [[[*range(tokens), *[-1] * (40 - tokens)]] * 3] * 2


@pytest.mark.parametrize("tokens", [333, 4000])
def test_ties_go_to_the_lowest_place(library: CpuLibrary, level: int, tokens: int) -> None:
    # Small integers: products are exact however they are added. One head a group, so that no log-sum-exp breaks a tie.
    queries, keys = numbers(2, 37, 32).round(), numbers(2, tokens, 32).round()
    expected = build_lists(queries, keys, 40, 0.25).sort(dim=-1).values
    assert torch.equal(written(library, queries, keys, 40, 0.25), expected)
    assert torch.equal(written(library, queries.bfloat16(), keys.bfloat16(), 40, 0.25), expected)
    alike = written(library, torch.ones(2, 1, 32), torch.ones(2, tokens, 32), 40, 1.0)
    assert alike.tolist() == [[[*range(40)]]] * 2


def both(library: CpuLibrary, queries: Tensor, keys: Tensor, rho: int) -> list[int]:
    """The only list by the definition, best key first; by the kernels it has the same keys, ascending."""
    ((best,),) = build_lists(queries, keys, rho, 1.0).tolist()
    if rho <= keys.shape[1]:
        assert written(library, queries, keys, rho, 1.0).tolist() == [[sorted(best)]]
    return best


def test_a_head_of_the_group_is_ranked_by_its_softmax(library: CpuLibrary, level: int) -> None:
    # Head 0 scores 9, 8, 0, 0 and head 1 scores 0, 0, 2, -9: by scores place 2 would be third, by weights it is first.
    keys, queries = torch.zeros(1, 4, 32), torch.zeros(2, 1, 32)
    keys[0, :2, 0], keys[0, 2:, 1] = torch.tensor([9.0, 8.0]), torch.tensor([2.0, -9.0])
    queries[0, 0, 0] = queries[1, 0, 1] = 1
    for rho, places in ((1, [2]), (2, [2, 0]), (3, [2, 0, 1]), (6, [2, 0, 1, 3, -1, -1])):
        assert both(library, queries, keys, rho) == places


def test_small_weights_still_have_an_order(library: CpuLibrary, level: int) -> None:
    keys = torch.zeros(1, 4, 32)
    keys[0, :, 0] = torch.tensor([400.0, 1.0, 3.0, 2.0])  # weights e^-397 and less are 0 in float32
    assert both(library, torch.ones(1, 1, 32), keys, 3) == [0, 2, 3]


@pytest.mark.parametrize(("group", "dim", "tokens"), [(1, 256, 34_000), (16, 32, 300_000)])
def test_long_regions_go_through_in_parts(library: CpuLibrary, group: int, dim: int, tokens: int) -> None:
    """More keys than are packed at once; scores of one centroid that exceed a tile's."""
    queries, keys = numbers(2 * group, 2, dim), numbers(2, tokens, dim)
    check_lists(written(library, queries, keys, 1280, dim**-0.5), queries, keys, dim**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_threads_nor_neighbours_change_a_list(library: CpuLibrary, dtype: torch.dtype) -> None:
    queries, keys = numbers(6, 75, 64, dtype=dtype), numbers(2, 3000, 64, dtype=dtype)
    torch.set_num_threads(1)  # the next test has as many as at first (conftest.py)
    lists = written(library, queries, keys, 100, 0.125)
    torch.set_num_threads(3)
    assert torch.equal(written(library, queries, keys, 100, 0.125), lists)
    assert torch.equal(written(library, queries[:, 40:], keys, 100, 0.125), lists[:, 40:])
    assert torch.equal(written(library, queries[3:], keys[1:], 100, 0.125), lists[1:])


def test_tensors_may_be_parts_of_larger_ones(library: CpuLibrary) -> None:
    queries, keys = numbers(6, 9, 64), numbers(2, 500, 64)
    expected = written(library, queries, keys, 30, 0.125)
    wide_queries, wide_keys = torch.full((6, 20, 70), torch.nan), torch.full((2, 600, 80), torch.nan)
    wide_queries[:, 5:14, :64], wide_keys[:, 4:504, :64] = queries, keys
    lists = torch.full((2, 12, 30), -7, dtype=torch.int32)
    write_lists(library, wide_queries[:, 5:14, :64], wide_keys[:, 4:504, :64], lists[:, :9], 0.125)
    assert torch.equal(lists[:, :9], expected)
    assert (lists[:, 9:] == -7).all()
    by_column = keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(written(library, queries, by_column, 30, 0.125), expected)


def test_a_bad_query_hurts_no_other_list(library: CpuLibrary, level: int) -> None:
    queries, keys = numbers(6, 9, 64), numbers(2, 3000, 64)
    expected = written(library, queries, keys, 100, 0.125)
    queries[0, 4, 3], queries[4, 7, 0] = torch.nan, torch.inf
    lists = written(library, queries, keys, 100, 0.125)
    assert (lists.diff(dim=-1) > 0).all()
    assert lists.min() >= 0
    assert lists.max() < 3000
    good = torch.ones(2, 9, dtype=torch.bool)
    good[0, 4] = good[1, 7] = False
    assert torch.equal(lists[good], expected[good])


def test_the_index_refuses_keys_of_another_dtype(library: CpuLibrary) -> None:
    index = NativeIndex(dataclasses.replace(make_context(Config(execution="cpu"), 64, 2, [100]), library=library))
    with pytest.raises(KernelError, match=r"keys: torch\.bfloat16.*must be torch\.float32"):
        index.build(0, numbers(2, 100, 64, dtype=torch.bfloat16), numbers(4, 10, 64))
