"""What of CTkvr's index for the GPU can be checked without one: work space, limits, costs, and how lists are built."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.index_cases import context_of
from torch import Tensor

from kvseek.core.batch import BUCKETS, most_requests
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.core.model_config import ModelConfig
from kvseek.plugins.ctkvr import device, device_build
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.device import LARGEST_KEYS, Workspace
from kvseek.plugins.ctkvr.device_build import DeviceBuilder, Sampling
from kvseek.plugins.ctkvr.measurements import costs
from kvseek.plugins.ctkvr.reference import ReferenceIndex
from kvseek.plugins.measurements import SelectionCosts

LLAMA = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 1 << 20)
FEW = Config(centroids=8, probes=8, **BY_KEYS)


def make_context(config: Config, slots: int, tokens: int) -> IndexContext:
    table = ExtentTable(slots, -(-tokens // 1024), 1)
    return context_of(config, 32, 3, table, [0] * slots)


@pytest.mark.parametrize(
    ("slots", "most"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 8), (9, 9), (10, 12), (17, 17), (18, 24)], ids=str
)
def test_the_work_space_holds_every_batch_and_its_padding(slots: int, most: int) -> None:
    assert most_requests(slots) == most
    max_batch = slots - 1  # of an engine: one slot is for padding
    assert next(size for size in BUCKETS if size >= max_batch) <= most
    space = Workspace(make_context(FEW, slots, 4096), 4, 100)
    assert space.recalled.shape == (most, 2, 100)
    assert space.statistics.shape == (most, 2, 7, 3, 2)
    space.require(most)
    with pytest.raises(KernelError, match=rf"batch = {most + 1}: must be at most {most}.*raise max_batch_size"):
        space.require(most + 1)


def test_keys_that_shared_memory_does_not_hold_get_memory_of_their_own() -> None:
    context = make_context(FEW, 2, 4096)
    most = LARGEST_KEYS // 4
    small, large = Workspace(context, 4, most), Workspace(context, 4, most + 1)
    assert (small.keys, small.shared_key_bytes) == (None, LARGEST_KEYS)
    assert large.keys.shape == (2, 2, 2, most + 1)
    assert large.shared_key_bytes == 0


def test_regions_that_shared_memory_has_no_bits_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(multiprocessors=132, shared_memory_per_block=99 << 10)
    monkeypatch.setattr(device, "ReferenceIndex", lambda context: ReferenceIndex(replace(context, cuda=None)))
    most = ((99 - 9) << 10) // (4 + 128) * 1024
    context = make_context(replace(FEW, top_k=8, recent=8), 1, most + 1)
    limit = rf"regions of up to {most + 1024} tokens .* must be at most {most} tokens,.*; lower max_seq_len"
    with pytest.raises(KernelError, match=limit):
        device.CudaIndex(replace(context, cuda=kernels))  # type: ignore[arg-type]


@pytest.mark.parametrize(("execution", "expected"), [("cpu", {}), ("codes", {"CTKVR_CODE_BITS": 4})])
def test_codes_are_a_macro_of_the_kernels(execution: str, expected: dict[str, int]) -> None:
    config = Config(execution=execution)
    assert device.cuda_macros(config, 128, 4) == expected
    if expected:
        with pytest.raises(ConfigError, match=r"head_dim = 32: must be a multiple of 32 from 64 to 256 with execution"):
            device.cuda_macros(config, 32, 4)


def test_costs_of_a_step() -> None:
    config = Config(execution="cpu")
    assert costs(config, LLAMA, 256, 2) == SelectionCosts(rows=256)
    found = costs(config, LLAMA, 131072, 2)
    assert found.rows == 256
    assert found.index_bytes * LLAMA.num_kv_heads == 2048 * 32 * (128 * 2 + 4), "the centroids of all query heads"
    assert found.reranked_keys == 16 * 1280 / 2
    assert found.rerank_bytes == 16 * 1280 * 4
    assert found.host_cores
    coded = costs(Config(), LLAMA, 131072, 2)
    assert coded.rerank_bytes == 16 * 1280 * 4 + 16 * 1280 / 2 * 66
    rest = {"host_cores": False, "rerank_bytes": coded.rerank_bytes, "reranked_keys": 0}
    assert coded == replace(found, **rest), "no key is read from the pool"
    short = costs(config, LLAMA, 600, 2)
    assert short.index_bytes == 38 * 4 * (128 * 2 + 4), "a centroid for 16 tokens"
    assert short.reranked_keys == 600


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
