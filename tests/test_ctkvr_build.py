"""What the GPU builder of CTkvr's lists does around its kernel, with a stand-in for the kernel on the CPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvseek.engine.cuda import CudaKernels
from kvseek.engine.errors import KernelError
from kvseek.plugins.ctkvr import device_build
from kvseek.plugins.ctkvr.build import build_lists, largest
from kvseek.plugins.ctkvr.device_build import DeviceBuilder, ListArguments

KV_HEADS, GROUP, DIM = 2, 3, 16


class StandIn:
    """Reads what the kernel would read, through the same pointers, and writes lists by its definition."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, int]] = []  # centroids, threads, bytes of shared memory

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, a: ListArguments, shared_bytes: int) -> None:
        assert name == "kvseek_ctkvr_list"
        assert grid == (a.centroids, 1, 1)
        assert a.row_stride % 8 == 0
        assert a.tokens > a.rho
        assert a.capacity >= a.rho + a.slack + 8 * threads
        assert a.slots > 2 * a.rho
        assert shared_bytes == 8 * (a.capacity + a.slots)
        self.launches.append((a.centroids, threads, shared_bytes))
        logits = memory(a.logits, torch.float16, GROUP * a.centroids * a.row_stride).view(GROUP, a.centroids, -1)
        scores = logits[:, :, : a.tokens].double() * memory(a.factors, torch.float32, GROUP)[:, None, None]
        values = scores - (scores.exp2().sum(dim=2, keepdim=True)).log2()
        lists = memory(a.lists, torch.int32, a.centroids * a.rho).view(a.centroids, a.rho)
        lists.copy_(largest(values.amax(dim=0).float(), a.rho))


def memory(pointer: int, dtype: torch.dtype, count: int) -> Tensor:
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(buffer, dtype=dtype)


def make(monkeypatch: pytest.MonkeyPatch, rho: int, shared_bytes: int = 227 << 10) -> tuple[StandIn, DeviceBuilder]:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    kernels = StandIn()
    return kernels, DeviceBuilder(cast(CudaKernels, kernels), GROUP, rho, DIM**-0.5)


def numbers(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
@pytest.mark.parametrize(("n", "tile_bytes"), [(500, 1 << 20), (1000, 2 * GROUP * 1024 * 7), (129, 1)])
def test_lists_of_all_heads_and_tiles(monkeypatch: pytest.MonkeyPatch, n: int, tile_bytes: int, scale: float) -> None:
    monkeypatch.setattr(device_build, "LOGIT_BYTES", tile_bytes)
    kernels, builder = make(monkeypatch, 40)
    # Powers of two on both sides cancel, so the same lists come out of tiny and of huge numbers.
    queries, keys = numbers(KV_HEADS * GROUP, 25, DIM, scale=2 / scale), numbers(KV_HEADS, n, DIM, scale=scale)
    room = torch.full((KV_HEADS, 30, 40), -7, dtype=torch.int32)
    builder.build(queries, keys, room)
    expected = build_lists(queries, keys, 40, DIM**-0.5)
    same = (room[:, :25].sort().values[..., :, None] == expected.sort().values[..., None, :]).any(dim=-1)
    assert same.float().mean() > 0.98, "but for keys whose logits agree to float16"
    assert (room[:, 25:] == -7).all()
    tiles = -(-25 // builder.tile(n, 25))
    assert len(kernels.launches) == KV_HEADS * tiles
    assert sum(count for count, *_ in kernels.launches) == KV_HEADS * 25
    assert tiles == {500: 1, 1000: 4, 129: 25}[n]


@pytest.mark.parametrize("n", [0, 1, 39, 40])
def test_short_regions_are_listed_whole(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    kernels, builder = make(monkeypatch, 40)
    lists = torch.full((KV_HEADS, 4, 40), -7, dtype=torch.int32)
    builder.build(numbers(KV_HEADS * GROUP, 3, DIM), numbers(KV_HEADS, n, DIM), lists)
    assert lists[:, :3].tolist() == [[[*range(n), *[-1] * (40 - n)]] * 3] * KV_HEADS
    assert (lists[:, 3:] == -7).all()
    assert not kernels.launches


def test_scaling_to_half_is_exact() -> None:
    tensor = numbers(3, 50, DIM) * torch.tensor([1e-4, 7.0, 3e4], dtype=torch.bfloat16)[:, None, None]
    tensor[1] = 0
    scaled, exponents = device_build._to_half(tensor, padded=64)
    assert torch.equal(torch.ldexp(scaled[:, :50].float(), exponents[:, None, None]), tensor.float())
    assert (scaled[:, 50:] == 0).all()
    assert (scaled.abs() < 1).all()


@pytest.mark.parametrize(("rho", "shared_kib", "threads"), [(1280, 227, 512), (2560, 227, 512), (2560, 99, 256)])
def test_the_block_fits_the_gpu(monkeypatch: pytest.MonkeyPatch, rho: int, shared_kib: int, threads: int) -> None:
    _, builder = make(monkeypatch, rho, shared_kib << 10)
    assert builder._threads == threads


def test_lists_that_no_block_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match=r"= 4000: lists of at most \d+ places.*lower top_k or recall_factor"):
        make(monkeypatch, 4000, 99 << 10)
    for shared_bytes in (99 << 10, 163 << 10, 227 << 10):
        with pytest.raises(KernelError) as caught:
            make(monkeypatch, 20_000, shared_bytes)
        most = int(str(caught.value).partition("at most ")[2].partition(" ")[0])
        assert make(monkeypatch, most, shared_bytes)
        with pytest.raises(KernelError):
            make(monkeypatch, most + 1, shared_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": numbers(KV_HEADS * GROUP + 1, 5, DIM)}, r"queries \[7, 5, 16\]"),
        ({"keys": numbers(KV_HEADS, 9, DIM + 1)}, r"keys \[2, 9, 17\]"),
        ({"lists": torch.empty(KV_HEADS, 4, 40, dtype=torch.int32)}, r"lists: torch.int32 \[2, 4, 40\].*at least 5"),
        ({"lists": torch.empty(KV_HEADS, 5, 40)}, "lists: torch.float32"),
        ({"lists": torch.empty(KV_HEADS, 5, 80, dtype=torch.int32)[..., ::2]}, "contiguous heads"),
        ({"keys": torch.empty(KV_HEADS, 9, DIM, device="meta")}, "keys: on meta: must be on cpu"),
    ],
)
def test_wrong_tensors_are_refused(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str) -> None:
    _, builder = make(monkeypatch, 40)
    good: dict[str, Any] = {
        "queries": numbers(KV_HEADS * GROUP, 5, DIM),
        "keys": numbers(KV_HEADS, 9, DIM),
        "lists": torch.empty(KV_HEADS, 5, 40, dtype=torch.int32),
    }
    with pytest.raises(KernelError, match=message):
        builder.build(**(good | change))
