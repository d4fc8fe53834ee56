"""Pinned host memory in huge pages: threads touch them first, and the driver then finds memory that is there already.

cuMemHostAlloc takes and clears one page of 4 KiB after the other, in one thread: some 0.5 s a GiB, which is minutes for the rows
of a server (docs/measurements.md has both times). Where the system has no huge pages, or the driver does not register such
memory, that is how it is allocated.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvseek.core.errors import CapacityError, KernelError

logger = logging.getLogger(__name__)

REGISTERED, BY_DRIVER = "cuMemHostRegister", "cuMemHostAlloc"
PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class PinnedMemory:
    """Memory that the host and a CUDA device address; it is freed when `buffer` is collected.

    Attributes
    ----------
    buffer : ctypes.Array
        The memory for the host; torch.frombuffer makes a tensor over it.
    device_pointer : int
        Its address for kernels of the device.
    way : str
        The call that made it known to the driver: REGISTERED or BY_DRIVER.
    """

    buffer: ctypes.Array[ctypes.c_byte]
    device_pointer: int
    way: str


class _Refused(Exception):
    """Why memory in huge pages is not to be had."""


def allocate(size: int, device: torch.device) -> PinnedMemory:
    """Allocate `size` bytes for a CUDA device, at least one; huge pages are zero, what the driver allocates is undefined.

    The caller has made sure that so much memory is free: otherwise the system would kill a process.

    Raises
    ------
    CapacityError
        If the driver refuses the memory; the message is its reason alone.
    KernelError
        If the device cannot be opened.
    """
    context = _open(device)
    driver = cuda_driver()
    check(driver.cuCtxPushCurrent(context), "entering the CUDA context")
    try:
        try:
            host, free = _huge_pages(size)
            way = REGISTERED
        except _Refused as reason:
            logger.warning(
                "%s bytes of pinned memory are allocated by cuMemHostAlloc, which takes long: %s", f"{size:,}", reason
            )
            host, free = _by_driver(size)
            way = BY_DRIVER
        (pointer,) = check(driver.cuMemHostGetDevicePointer(host, 0), "mapping pinned memory into the device")
    finally:
        driver.cuCtxPopCurrent()
    buffer = (ctypes.c_byte * size).from_address(host)
    # Not at exit: a thread may still be decoding then, and the end of the process frees everything.
    weakref.finalize(buffer, _free, free, context).atexit = False
    return PinnedMemory(buffer, int(pointer), way)


def _huge_pages(size: int) -> tuple[int, Callable[[], None]]:
    """Map and register memory; returns its address and what frees it. Raises _Refused with the reason."""
    try:
        # Private, as the size of shared pages is another setting of the system.
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _Refused(f"mmap: {error.strerror}") from None
    try:
        # A child's copy of a page could leave the device with the page that the parent no longer has.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            mapped.madvise(advice)
    except OSError as error:
        mapped.close()
        raise _Refused(f"madvise: {error.strerror}") from None
    address = ctypes.addressof(ctypes.c_byte.from_buffer(mapped))
    # PyTorch's threads write a byte of each page, which makes the system provide it.
    torch.frombuffer(mapped, dtype=torch.uint8)[::PAGE_BYTES].zero_()
    driver = cuda_driver()
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    (status,) = driver.cuMemHostRegister(address, size, flags)
    if status != driver.CUresult.CUDA_SUCCESS:
        mapped.close()
        raise _Refused(f"cuMemHostRegister: {name_of(status)}")

    def free() -> None:
        driver.cuMemHostUnregister(address)
        mapped.close()

    return address, free


def _by_driver(size: int) -> tuple[int, Callable[[], None]]:
    """Allocate memory by the driver; returns its address and what frees it."""
    driver = cuda_driver()
    status, host = driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CapacityError(f"cuMemHostAlloc: {name_of(status)}")
    return int(host), partial(driver.cuMemFreeHost, host)


def _free(free: Callable[[], None], context: Any) -> None:
    """Free memory once the device has finished with it; the thread that drops the last reference runs this."""
    driver = cuda_driver()
    driver.cuCtxPushCurrent(context)
    driver.cuCtxSynchronize()
    free()
    driver.cuCtxPopCurrent()


def _open(device: torch.device) -> Any:
    """Return the primary context of a CUDA device, to which PyTorch's memory belongs."""
    driver = cuda_driver()
    check(driver.cuInit(0), "starting the CUDA driver")
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    (gpu,) = check(driver.cuDeviceGet(ordinal), f"opening CUDA device {ordinal}")
    (context,) = check(driver.cuDevicePrimaryCtxRetain(gpu), f"opening CUDA device {ordinal}")
    return context


def cuda_driver() -> Any:
    """Import the CUDA driver's bindings, only when they are used: only CUDA engines need the package."""
    from cuda.bindings import driver

    return driver


def check(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Return the values that a driver call gives after its status; raises KernelError unless the status is success."""
    status, *values = result
    if status != cuda_driver().CUresult.CUDA_SUCCESS:
        raise KernelError(f"{what}: {name_of(status)}; check the device with nvidia-smi")
    return tuple(values)


def name_of(status: Any) -> str:
    """Return the name of a status that the driver gave."""
    return str(getattr(status, "name", status))
