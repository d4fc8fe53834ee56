"""Pinned host memory: kernels read what the host writes, in either way of allocating it, and it is given back."""

from __future__ import annotations

import gc
import logging
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvseek.engine.cache.host_memory import BY_DRIVER, REGISTERED, PinnedMemory, allocate, cuda_driver

pytestmark = pytest.mark.gpu

BYTES = 3 << 21  # whole huge pages and, as mappings need not begin at one, parts of them


def resident_bytes() -> int:
    """Memory of the process that is in use, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def mapped(address: int) -> bool:
    """Whether the process has memory at an address."""
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


def check_that_kernels_read_it(memory: PinnedMemory, device: torch.device) -> None:
    rows = torch.frombuffer(memory.buffer, dtype=torch.int64)
    assert rows.is_pinned()
    rows.copy_(torch.arange(len(rows)))
    described = {"shape": tuple(rows.shape), "typestr": "<i8", "data": (memory.device_pointer, False), "version": 3}
    on_device = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=device)
    assert on_device.data_ptr() == memory.device_pointer
    assert torch.equal(on_device * 2, torch.arange(len(rows), device=device) * 2)  # a kernel reads host memory in place


def test_kernels_read_what_the_host_writes(device: torch.device) -> None:
    memory = allocate(BYTES, device)
    assert memory.way == REGISTERED
    check_that_kernels_read_it(memory, device)
    address = torch.frombuffer(memory.buffer, dtype=torch.uint8).data_ptr()
    assert mapped(address)
    del memory
    gc.collect()
    assert not mapped(address)


def test_where_registering_fails_the_driver_allocates_and_the_log_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = cuda_driver()
    refused = (driver.CUresult.CUDA_ERROR_NOT_PERMITTED,)
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda address, size, flags: refused)
    with caplog.at_level(logging.WARNING):
        memory = allocate(BYTES, device)
    assert memory.way == BY_DRIVER
    assert "6291456 bytes of pinned memory are allocated by cuMemHostAlloc, which takes long" in caplog.text
    assert "cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED" in caplog.text
    check_that_kernels_read_it(memory, device)


def test_memory_is_given_back(device: torch.device) -> None:
    before = resident_bytes()
    for _ in range(64):  # 4 GiB, were it kept
        allocate(64 << 20, device)
    gc.collect()
    assert resident_bytes() - before < 1 << 30
