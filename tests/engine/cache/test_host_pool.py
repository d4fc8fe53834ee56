"""The host pool's rows and refusals. Pinned memory and copies from a GPU: tests/gpu/engine/test_cache.py."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import CapacityError
from kvseek.engine.cache import row_storage
from kvseek.engine.cache.row_storage import HostPool

CPU = torch.device("cpu")


@pytest.mark.parametrize(("layers", "kv_heads"), [(1, 1), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_arrive_where_kernels_look(layers: int, kv_heads: int, dtype: torch.dtype) -> None:
    pool = HostPool(3, 4, kv_heads, 8, dtype, CPU)
    pool.rows.zero_()
    everything = torch.randn(layers, kv_heads, 40, 2, 8).to(dtype)
    pool.write(1, 4 - layers, slice(1000, 1024), everything[:, :, 7:31])
    expected = torch.zeros_like(pool.rows)
    expected[1, 4 - layers :, :, 1000:1024] = everything[:, :, 7:31]
    assert torch.equal(pool.rows, expected)
    head, position = kv_heads - 1, 1010
    numbers = (3 * 3 + 1) * kv_heads * EXTENT_TOKENS * 2 * 8 + (head * EXTENT_TOKENS + position) * 2 * 8
    row = (ctypes.c_byte * (16 * dtype.itemsize)).from_address(pool.device_pointer + numbers * dtype.itemsize)
    assert torch.equal(torch.frombuffer(row, dtype=dtype).view(2, 8), everything[-1, -1, 17])


def test_memory_that_the_system_needs_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * EXTENT_TOKENS * 2 * 4 * 4
    monkeypatch.setattr(row_storage, "available_bytes", lambda: size + row_storage.PINNED_RESERVE_BYTES - 1)
    with pytest.raises(CapacityError, match=r"needs 65,536 bytes of host memory, 1,073,807,359 are available"):
        HostPool(2, 1, 1, 4, torch.float32, torch.device("cuda", 0))


@pytest.mark.parametrize(("shape", "dtype"), [((1, 1, 4, 2, 4), torch.float32), ((1, 1, 3, 2, 4), torch.bfloat16)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = HostPool(1, 1, 1, 4, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"must be \(1, 1, 3, 2, 4\) torch.float32"):
        pool.write(0, 0, slice(0, 3), torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 0)], ids=str)
def test_a_pool_of_no_layers_takes_no_memory(device: torch.device) -> None:
    assert HostPool(5, 0, 2, 4, torch.float32, device).rows.shape == (5, 0, 2, EXTENT_TOKENS, 2, 4)


def test_too_much_pageable_memory_is_refused() -> None:
    with pytest.raises(CapacityError, match="needs 288,230,376,151,711,744 bytes of host memory"):
        HostPool(1 << 30, 1 << 6, 8, 128, torch.bfloat16, CPU)
