"""What the GPU builder of CTkvr's lists computes and refuses on the host. Its lists: tests/gpu/plugins/test_ctkvr_build.py."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
from kvseek.plugins.ctkvr import device_build
from kvseek.plugins.ctkvr.device_build import DeviceBuilder, Sampling

KV_HEADS, GROUP, DIM = 2, 3, 32


class Kernels:
    """Of a GPU with four multiprocessors; nothing may be launched."""

    device = torch.device("cpu")
    multiprocessors = 4


def make(rho: int) -> DeviceBuilder:
    return DeviceBuilder(cast(CudaKernels, Kernels()), GROUP, rho, DIM**-0.5)


def numbers(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


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
    builder = DeviceBuilder(cast(CudaKernels, Kernels()), 4, 1280, 128**-0.5)
    assert builder.band(capacity, 8, 128, 2048) == 1024
    assert 8 * capacity * 8 * 1024 <= device_build.WORK_BYTES
    assert builder.band(capacity, 8, 128, 33) == 64, "whole tiles of 32"
    assert builder.band(1 << 30, 8, 128, 100) == 32


@pytest.mark.parametrize(("blocks", "samples", "parts"), [(12, 1 << 20, 1), (8, 1 << 20, 3), (1, 512, 1), (1, 4096, 8)])
def test_parts_fill_the_gpu(blocks: int, samples: int, parts: int) -> None:
    assert make(40)._parts(blocks, samples) == parts  # of 4 processors with 3 blocks each


@pytest.mark.parametrize("n", [0, 1, 39, 40])
def test_short_regions_are_listed_whole(n: int) -> None:
    builder = make(40)
    lists = torch.full((KV_HEADS, 4, 40), -7, dtype=torch.int32)
    builder.build(numbers(KV_HEADS * GROUP, 3, DIM), numbers(KV_HEADS, n, DIM), lists)
    assert lists[:, :3].tolist() == [[[*range(n), *[-1] * (40 - n)]] * 3] * KV_HEADS
    assert (lists[:, 3:] == -7).all()


def test_scaling_to_half_is_exact() -> None:
    tensor = numbers(3, 50, DIM) * torch.tensor([1e-4, 7.0, 3e4], dtype=torch.bfloat16)[:, None, None]
    tensor[1] = 0
    scaled, exponents = device_build._to_half(tensor)
    assert torch.equal(torch.ldexp(scaled.float(), exponents[:, None, None]), tensor.float())
    assert (scaled.abs() < 1).all()


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
    builder = make(40)
    good: dict[str, Any] = {
        "queries": numbers(KV_HEADS * GROUP, 5, DIM),
        "keys": numbers(KV_HEADS, 9, DIM),
        "lists": torch.empty(KV_HEADS, 5, 40, dtype=torch.int32),
    }
    with pytest.raises(KernelError, match=message):
        builder.build(**(good | change))
