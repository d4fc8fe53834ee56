"""The host pool, with a driver that stands in for CUDA's: host memory plays the device's."""

from __future__ import annotations

import ctypes
import gc
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import CapacityError, KernelError
from kvseek.engine.cache import host_pool
from kvseek.engine.cache.host_pool import HostPool

GPU = torch.device("cuda", 0)
MAX_PITCH = (1 << 31) - 1  # as drivers report it
MAPPING = 1 << 20  # what the driver below adds to a host address to make a device address


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """What host_pool calls of cuda.bindings.driver."""

    CUresult = Status
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE="device", CU_MEMORYTYPE_HOST="host")
    CUDA_MEMCPY2D = SimpleNamespace
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2

    def __init__(self) -> None:
        self.memory: dict[int, ctypes.Array[ctypes.c_byte]] = {}
        self.contexts: list[str] = []
        self.copies = 0
        self.fail: Status | None = None

    def cuInit(self, flags: int) -> tuple[Status]:
        return (Status.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Status, str]:
        return Status.CUDA_SUCCESS, f"context {device}"

    def cuCtxPushCurrent(self, context: str) -> tuple[Status]:
        self.contexts.append(context)
        return (Status.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Status, str]:
        return Status.CUDA_SUCCESS, self.contexts.pop()

    def cuCtxSynchronize(self) -> tuple[Status]:
        return (Status.CUDA_SUCCESS,)

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Status, int]:
        assert flags == 3
        assert self.contexts == ["context 0"]
        if self.fail is not None:
            return self.fail, 0
        block = (ctypes.c_byte * size)()
        self.memory[ctypes.addressof(block)] = block
        return Status.CUDA_SUCCESS, ctypes.addressof(block)

    def cuMemHostGetDevicePointer(self, host: int, flags: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, host + MAPPING

    def cuMemFreeHost(self, host: int) -> tuple[Status]:
        del self.memory[host]
        return (Status.CUDA_SUCCESS,)

    def cuMemcpy2DAsync(self, copy: SimpleNamespace, stream: object) -> tuple[Status]:
        assert (copy.srcMemoryType, copy.dstMemoryType) == ("device", "host")
        pitches = (copy.srcPitch, copy.dstPitch)
        if self.fail is not None or copy.WidthInBytes > min(pitches) or max(pitches) > MAX_PITCH:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        for run in range(copy.Height):
            source, target = copy.srcDevice + run * copy.srcPitch, copy.dstHost + run * copy.dstPitch
            ctypes.memmove(target, source, copy.WidthInBytes)
        self.copies += 1
        return (Status.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(host_pool, "_driver", lambda: stand_in)
    monkeypatch.setattr(host_pool, "_current_stream", lambda rows: 0)
    return stand_in


@pytest.mark.parametrize("device", [torch.device("cpu"), GPU], ids=str)
@pytest.mark.parametrize(("layers", "kv_heads"), [(1, 1), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_arrive_where_kernels_look(
    driver: Driver, device: torch.device, layers: int, kv_heads: int, dtype: torch.dtype
) -> None:
    pool = HostPool(3, 4, kv_heads, 8, dtype, device)
    pool.rows.zero_()
    everything = torch.randn(layers, kv_heads, 40, 2, 8).to(dtype)
    pool.write(1, 4 - layers, slice(1000, 1024), everything[:, :, 7:31])
    expected = torch.zeros_like(pool.rows)
    expected[1, 4 - layers :, :, 1000:1024] = everything[:, :, 7:31]
    assert torch.equal(pool.rows, expected)
    assert driver.copies == (device == GPU), "all layers and heads travel in one copy"
    head, position = kv_heads - 1, 1010
    numbers = (1 * 4 + 3) * kv_heads * EXTENT_TOKENS * 2 * 8 + (head * EXTENT_TOKENS + position) * 2 * 8
    address = pool.device_pointer - (MAPPING if device == GPU else 0) + numbers * dtype.itemsize
    row = (ctypes.c_byte * (16 * dtype.itemsize)).from_address(address)
    assert torch.equal(torch.frombuffer(row, dtype=dtype).view(2, 8), everything[-1, -1, 17])


@pytest.mark.parametrize(("kv_heads", "stride", "copies"), [(2, 1 << 29, 2), (2, (1 << 29) - 1, 1), (1, 1 << 29, 1)])
def test_runs_further_apart_than_a_strided_copy_allows(driver: Driver, kv_heads: int, stride: int, copies: int) -> None:
    pool = HostPool(2, 1, kv_heads, 4, torch.float32, GPU)
    pool.rows.zero_()
    memory = torch.empty(kv_heads * stride)  # pages that are never touched take no memory
    rows = memory.as_strided((1, kv_heads, 3, 2, 4), (stride, stride, 8, 4, 1))
    rows.copy_(torch.randn(rows.shape))
    pool.write(1, 0, slice(5, 8), rows)
    expected = torch.zeros_like(pool.rows)
    expected[1, :, :, 5:8] = rows
    assert torch.equal(pool.rows, expected)
    assert driver.copies == copies


def test_pinned_memory_is_freed_with_the_last_tensor(driver: Driver) -> None:
    pool = HostPool(2, 1, 1, 4, torch.float32, GPU)
    view = pool.rows[1]
    del pool
    gc.collect()
    assert len(driver.memory) == 1, "a tensor still reads it"
    del view
    gc.collect()
    assert not driver.memory
    assert not driver.contexts


def test_what_the_driver_refuses_is_a_capacity_error(driver: Driver) -> None:
    driver.fail = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(
        CapacityError, match=r"needs 65,536 bytes .* are available .*OUT_OF_MEMORY.*lower .*max_seq_len"
    ):
        HostPool(2, 1, 1, 4, torch.float32, GPU)
    assert not driver.contexts


def test_memory_that_the_system_needs_is_not_pinned(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * EXTENT_TOKENS * 2 * 4 * 4
    monkeypatch.setattr(host_pool, "available_bytes", lambda: size + host_pool.PINNED_RESERVE_BYTES - 1)
    with pytest.raises(CapacityError, match=r"needs 65,536 bytes of host memory, 1,073,807,359 are available"):
        HostPool(2, 1, 1, 4, torch.float32, GPU)
    monkeypatch.setattr(host_pool, "available_bytes", lambda: size + host_pool.PINNED_RESERVE_BYTES)
    assert HostPool(2, 1, 1, 4, torch.float32, GPU).pinned


def test_a_failed_copy_is_a_kernel_error(driver: Driver) -> None:
    pool = HostPool(1, 1, 1, 4, torch.float32, GPU)
    driver.fail = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(KernelError, match="copying rows to the row pool: CUDA_ERROR_INVALID_VALUE"):
        pool.write(0, 0, slice(0, 3), torch.ones(1, 1, 3, 2, 4))


@pytest.mark.parametrize(("shape", "dtype"), [((1, 1, 4, 2, 4), torch.float32), ((1, 1, 3, 2, 4), torch.bfloat16)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = HostPool(1, 1, 1, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"must be \(1, 1, 3, 2, 4\) torch.float32"):
        pool.write(0, 0, slice(0, 3), torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("device", [torch.device("cpu"), GPU], ids=str)
def test_a_pool_of_no_layers_takes_no_memory(driver: Driver, device: torch.device) -> None:
    pool = HostPool(5, 0, 2, 4, torch.float32, device)
    assert pool.rows.shape == (5, 0, 2, EXTENT_TOKENS, 2, 4)
    assert not driver.memory


def test_too_much_pageable_memory_is_refused() -> None:
    with pytest.raises(CapacityError, match="needs 288,230,376,151,711,744 bytes of host memory"):
        HostPool(1 << 30, 1 << 6, 8, 128, torch.bfloat16, torch.device("cpu"))
