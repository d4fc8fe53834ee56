"""What the GPU builder of CTkvr's lists does around its kernels, with stand-ins for them on the CPU."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
from kvseek.plugins.ctkvr import device_build
from kvseek.plugins.ctkvr.build import build_lists
from kvseek.plugins.ctkvr.device_build import DeviceBuilder, ListArguments, Sampling

KV_HEADS, GROUP, DIM = 2, 3, 32
PADDED_GROUP, OPERAND = 4, torch.bfloat16


class StandIn:
    """Reads what the kernels would read, through the same pointers, and writes what they would write."""

    device = torch.device("cpu")
    multiprocessors = 4

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int, int]]] = []
        self.counts: list[Tensor] = []  # of candidates, as the kernel that lists them finds them

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, a: ListArguments, shared_bytes: int) -> None:
        kind = name.removeprefix("kvseek_ctkvr_")
        self.launches.append((kind, grid))
        blocks = a.centroids if kind in ("bound", "list") else -(-a.centroids // (128 // PADDED_GROUP))
        assert grid[:2] == (blocks, KV_HEADS)
        assert threads == (256 if kind in ("bound", "list") else 128)
        assert shared_bytes == (0 if kind in ("bound", "list") else 3 * 64 * (DIM + 8) * 2)
        assert a.tokens > a.rho
        assert 1 <= a.rank <= a.tokens // a.stride
        assert a.capacity >= max(a.samples if a.stride > 1 else 0, a.rho + 256 + threads)
        getattr(self, kind)(a, grid[2])

    def sum(self, a: ListArguments, parts: int) -> None:
        assert (a.stride, a.samples, a.parts) == (1, a.tokens, parts)
        sums = memory(a.sums, torch.float32, parts * KV_HEADS * GROUP * a.centroids * 2).view(
            parts, KV_HEADS * GROUP, -1, 2
        )
        for part in range(parts):  # as blocks take them, but for one key where blocks take 64
            scores = logits(a)[..., part::parts]
            sums[part, ..., 0] = scores.amax(dim=2)
            sums[part, ..., 1] = (scores - scores.amax(dim=2, keepdim=True)).exp2().sum(dim=2)

    def gather(self, a: ListArguments, parts: int) -> None:
        assert parts >= 1
        assert a.samples == a.tokens // a.stride
        places = torch.arange(a.samples) * a.stride  # the kernel takes others of each stride
        entries = values(a)[..., places].mul(2**20).long() * 2**20 - places
        counts, bounds, candidates = tables(a)
        for entry, count, bound, room in zip(
            entries.flatten(0, 1), counts.flatten(), bounds.flatten(), candidates.flatten(0, 1), strict=True
        ):
            found = entry if bound == 0 else entry[entry >= bound]
            assert count == 0
            count += len(found)
            room[: len(found)] = found[: len(room)]

    def bound(self, a: ListArguments, _: int) -> None:
        counts, bounds, candidates = tables(a)
        assert (counts == a.samples).all()
        bounds.copy_(candidates[..., : a.samples].sort(descending=True).values[..., a.rank - 1])
        counts.zero_()

    def list(self, a: ListArguments, _: int) -> None:
        assert a.samples == a.tokens // a.stride
        counts, _bounds, candidates = tables(a)
        self.counts.append(counts.clone())
        behind = torch.arange(a.capacity) >= counts[..., None]
        best = candidates.masked_fill(behind, -(2**62)).topk(a.rho).values
        for head in range(KV_HEADS):
            lists = memory(a.lists + 4 * head * a.list_stride, torch.int32, a.centroids * a.rho).view(-1, a.rho)
            lists.copy_(-best[head] % 2**20)


def logits(a: ListArguments) -> Tensor:
    """Float64 [H, C, n]: binary logarithms of weights up to their sums."""
    queries = strided(a.queries, KV_HEADS * GROUP, a.query_stride, a.centroids, DIM).double()
    keys = strided(a.keys, KV_HEADS, a.head_stride, a.tokens, a.key_stride).double()
    factors = memory(a.factors, torch.float32, KV_HEADS * GROUP)[:, None, None]
    return queries @ keys.repeat_interleave(GROUP, dim=0).transpose(1, 2) * factors


def values(a: ListArguments) -> Tensor:
    sums = memory(a.sums, torch.float32, a.parts * KV_HEADS * GROUP * a.centroids * 2)
    largest_, sum_ = sums.view(a.parts, KV_HEADS * GROUP, -1, 2).double().unbind(-1)
    logarithms = (sum_.log2() + largest_).mul(math.log(2)).logsumexp(dim=0) / math.log(2)
    return (logits(a) - logarithms[..., None]).view(KV_HEADS, GROUP, a.centroids, -1).amax(dim=1)


def tables(a: ListArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Counts and bounds [G, C], candidates [G, C, capacity]."""
    lists = KV_HEADS * a.centroids
    candidates = memory(a.candidates, torch.int64, lists * a.capacity).view(KV_HEADS, a.centroids, -1)
    counts, bounds = memory(a.counts, torch.int32, lists), memory(a.bounds, torch.int64, lists)
    return counts.view(KV_HEADS, -1), bounds.view(KV_HEADS, -1), candidates


def strided(pointer: int, heads: int, head_stride: int, rows: int, row_stride: int) -> Tensor:
    """16-bit numbers [heads, rows, DIM]."""
    every = memory(pointer, OPERAND, (heads - 1) * head_stride + (rows - 1) * row_stride + DIM)
    return every.as_strided((heads, rows, DIM), (head_stride, row_stride, 1))


def memory(pointer: int, dtype: torch.dtype, count: int) -> Tensor:
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(buffer, dtype=dtype)


def make(rho: int) -> tuple[StandIn, DeviceBuilder]:
    kernels = StandIn()
    return kernels, DeviceBuilder(cast(CudaKernels, kernels), GROUP, rho, DIM**-0.5)


def numbers(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
@pytest.mark.parametrize(
    ("n", "samples", "work_bytes", "bands"), [(500, 4096, 1 << 30, 1), (1000, 128, 600_000, 2), (129, 64, 1, 3)]
)
def test_lists_of_all_heads_and_bands(
    monkeypatch: pytest.MonkeyPatch, n: int, samples: int, work_bytes: int, bands: int, scale: float
) -> None:
    monkeypatch.setattr(device_build, "WORK_BYTES", work_bytes)
    monkeypatch.setattr(device_build, "SAMPLES", samples)
    kernels, builder = make(40)
    queries, keys = numbers(KV_HEADS * GROUP, 70, DIM, scale=2 / scale), numbers(KV_HEADS, n, DIM, scale=scale)
    room = torch.full((KV_HEADS, 75, 40), -7, dtype=torch.int32)
    builder.build(queries, keys, room)
    expected = build_lists(queries, keys, 40, DIM**-0.5)
    assert same_share(room[:, :70], expected) > 0.995, "but for keys whose values agree to the stand-in's 2^-20"
    assert (room[:, 70:] == -7).all()
    steps = ["sum", "gather", "list"] if n <= samples else ["sum", "gather", "bound", "gather", "list"]
    assert [kind for kind, _ in kernels.launches] == bands * steps
    assert sum(counts.shape[1] for counts in kernels.counts) == 70
    assert all(counts.min() >= 40 for counts in kernels.counts)


def same_share(first: Tensor, second: Tensor) -> float:
    """Share of places of the first lists that the second lists hold too."""
    return (first[..., :, None] == second[..., None, :]).any(dim=-1).double().mean().item()


def test_keys_and_queries_may_lie_anywhere() -> None:
    queries, keys = numbers(KV_HEADS * GROUP, 20, DIM), numbers(KV_HEADS, 300, DIM)
    expected = torch.empty(KV_HEADS, 20, 40, dtype=torch.int32)
    make(40)[1].build(queries, keys, expected)
    spread = torch.full((300, KV_HEADS, DIM + 8), torch.nan, dtype=torch.bfloat16)
    odd = torch.full((KV_HEADS, 300, DIM + 1), torch.nan, dtype=torch.bfloat16)
    spread[..., :DIM], odd[..., 1:] = keys.transpose(0, 1), keys
    for other in (spread[..., :DIM].transpose(0, 1), odd[..., 1:], keys.transpose(1, 2).contiguous().transpose(1, 2)):
        lists = torch.empty_like(expected)
        make(40)[1].build(queries.transpose(0, 1).contiguous().transpose(0, 1), other, lists)
        assert torch.equal(lists, expected)


@pytest.mark.parametrize(
    ("tokens", "rho"),
    [
        (41, 40),
        (4096, 1280),
        (4097, 1),
        (4097, 4096),
        (5200, 5120),
        (8192, 5120),
        (5003, 1280),
        (70_001, 2560),
        (131_072, 640),
        (131_072, 1280),
        (1_000_000, 40),
    ],
)
def test_a_sample_bounds_the_candidates(tokens: int, rho: int) -> None:
    sampling = Sampling.of(tokens, rho)
    assert sampling.samples == tokens // sampling.stride
    if sampling.stride == 1:
        assert sampling.capacity >= tokens
        return
    assert 1 <= sampling.rank <= sampling.samples <= device_build.SAMPLES
    # One key of each stride is drawn: how many keys reach the sampled entry of that rank, in a hundred random orders?
    generator = torch.Generator().manual_seed(tokens)
    for _ in range(100 if tokens < 500_000 else 10):
        order = torch.randperm(tokens, generator=generator)  # 0 is the best key
        drawn = torch.arange(sampling.samples) * sampling.stride
        drawn += torch.randint(sampling.stride, drawn.shape, generator=generator)
        reached = int(order[drawn].sort().values[sampling.rank - 1]) + 1
        assert rho <= reached <= sampling.capacity


def test_memory_of_a_long_prompt() -> None:
    capacity = Sampling.of(131_072, 1280).capacity
    kernels = StandIn()
    builder = DeviceBuilder(cast(CudaKernels, kernels), 4, 1280, 128**-0.5)
    assert builder.band(capacity, 8, 128, 2048) == 1024
    assert 8 * capacity * 8 * 1024 <= device_build.WORK_BYTES
    assert builder.band(capacity, 8, 128, 33) == 64, "whole tiles of 32"
    assert builder.band(1 << 30, 8, 128, 100) == 32


@pytest.mark.parametrize(("blocks", "samples", "parts"), [(12, 1 << 20, 1), (8, 1 << 20, 3), (1, 512, 1), (1, 4096, 8)])
def test_parts_fill_the_gpu(blocks: int, samples: int, parts: int) -> None:
    assert make(40)[1]._parts(blocks, samples) == parts  # of 4 processors with 3 blocks each


@pytest.mark.parametrize("n", [0, 1, 39, 40])
def test_short_regions_are_listed_whole(n: int) -> None:
    kernels, builder = make(40)
    lists = torch.full((KV_HEADS, 4, 40), -7, dtype=torch.int32)
    builder.build(numbers(KV_HEADS * GROUP, 3, DIM), numbers(KV_HEADS, n, DIM), lists)
    assert lists[:, :3].tolist() == [[[*range(n), *[-1] * (40 - n)]] * 3] * KV_HEADS
    assert (lists[:, 3:] == -7).all()
    assert not kernels.launches


def test_scaling_to_half_is_exact() -> None:
    tensor = numbers(3, 50, DIM) * torch.tensor([1e-4, 7.0, 3e4], dtype=torch.bfloat16)[:, None, None]
    tensor[1] = 0
    scaled, exponents = device_build._to_half(tensor)
    assert torch.equal(torch.ldexp(scaled.float(), exponents[:, None, None]), tensor.float())
    assert (scaled.abs() < 1).all()


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_float32_is_scaled(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    monkeypatch.setattr(sys.modules[__name__], "OPERAND", torch.float16)
    queries, keys = numbers(KV_HEADS * GROUP, 20, DIM).float() / scale, numbers(KV_HEADS, 300, DIM).float() * scale
    lists = torch.empty(KV_HEADS, 20, 40, dtype=torch.int32)
    make(40)[1].build(queries, keys, lists)
    assert same_share(lists, build_lists(queries, keys, 40, DIM**-0.5)) > 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": numbers(KV_HEADS * GROUP + 1, 5, DIM)}, r"queries \[7, 5, 32\]"),
        (
            {"queries": numbers(KV_HEADS * GROUP, 5, DIM, dtype=torch.float16)},
            "queries: torch.float16: must be torch.bf",
        ),
        ({"keys": numbers(KV_HEADS, 9, DIM + 1)}, r"keys \[2, 9, 33\]"),
        ({"lists": torch.empty(KV_HEADS, 4, 40, dtype=torch.int32)}, r"lists: torch.int32 \[2, 4, 40\].*at least 5"),
        ({"lists": torch.empty(KV_HEADS, 5, 40)}, "lists: torch.float32"),
        ({"lists": torch.empty(KV_HEADS, 5, 80, dtype=torch.int32)[..., ::2]}, "contiguous heads"),
        ({"keys": torch.empty(KV_HEADS, 9, DIM, device="meta")}, "keys: on meta: must be on cpu"),
    ],
)
def test_wrong_tensors_are_refused(change: dict[str, Any], message: str) -> None:
    _, builder = make(40)
    good: dict[str, Any] = {
        "queries": numbers(KV_HEADS * GROUP, 5, DIM),
        "keys": numbers(KV_HEADS, 9, DIM),
        "lists": torch.empty(KV_HEADS, 5, 40, dtype=torch.int32),
    }
    with pytest.raises(KernelError, match=message):
        builder.build(**(good | change))
