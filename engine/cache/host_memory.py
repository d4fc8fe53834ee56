"""Host memory: how much can be allocated now, as system and control groups leave it, and how it is pinned for a GPU.

Pinned memory lies in huge pages: threads touch them first, and the driver then finds memory that is there already.
cuMemHostAlloc provides and clears all memory in one thread, a small page at a time, so minutes for the rows of a server. It is
still how memory is allocated where the driver does not register what the process has mapped itself.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from kvseek.core.errors import CapacityError, KernelError

REGISTERED, BY_DRIVER = "cuMemHostRegister", "cuMemHostAlloc"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hierarchy:
    """A version of control groups: its mount point, and the files that state a group's limit and usage."""

    mount: str
    limit_file: str
    usage_file: str


VERSION_1 = Hierarchy("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
VERSION_2 = Hierarchy("sys/fs/cgroup", "memory.max", "memory.current")


def available_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that can be allocated now, in bytes.

    This is the smallest of MemAvailable and of the room that each of the process's control groups and of their ancestors has
    left below its limit.

    Parameters
    ----------
    root : Path
        Folder that holds proc and sys.
    """
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    system = int(fields["MemAvailable"].split()[0]) * 1024
    return min([system, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each group with a limit has left; cached files do not count as used."""
    for group, hierarchy in _groups(root):
        if not (group / hierarchy.limit_file).is_file():
            continue  # the root of a hierarchy has no limit, and a container does not see the groups above its own
        limit = (group / hierarchy.limit_file).read_text(encoding="ascii").strip()
        if limit != "max":
            usage = int((group / hierarchy.usage_file).read_text(encoding="ascii"))
            yield max(0, int(limit) - usage + _file_cache(group / "memory.stat"))


def _groups(root: Path) -> Iterator[tuple[Path, Hierarchy]]:
    """Yield the folders of the process's memory groups and of their ancestors."""
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return  # a kernel without control groups
    for line in listing.read_text(encoding="utf-8").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = VERSION_1 if controllers else VERSION_2
        path = PurePosixPath(name.lstrip("/"))
        for group in (path, *path.parents):
            yield root / hierarchy.mount / group, hierarchy


def _file_cache(statistics: Path) -> int:
    """Return the bytes of cached files that a group is charged with; the system drops them when memory is asked for.

    Version 1 counts a group without its descendants under the plain names, and with its descendants under total_<name>.
    """
    counts = dict(line.split() for line in statistics.read_text(encoding="ascii").splitlines())
    return sum(int(counts.get(f"total_{name}", counts[name])) for name in ("active_file", "inactive_file"))


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
        The driver's function that pinned it: REGISTERED or BY_DRIVER.
    """

    buffer: ctypes.Array[ctypes.c_byte]
    device_pointer: int
    way: str


class NotRegisteredError(Exception):
    """Why memory that the process maps itself cannot be pinned."""


def allocate(size: int, device: torch.device) -> PinnedMemory:
    """Allocate `size` bytes, at least one, for a CUDA device: registered, or by the driver where that fails.

    The caller has made sure that so much memory is free: otherwise the system would kill a process.

    Raises
    ------
    CapacityError
        If the driver refuses the memory; the message is its reason alone.
    KernelError
        If the device cannot be opened.
    """
    try:
        return allocate_registered(size, device)
    except NotRegisteredError as reason:
        logger.warning("%s bytes of pinned memory are allocated by cuMemHostAlloc, which takes long: %s", size, reason)
        return allocate_by_driver(size, device)


def allocate_registered(size: int, device: torch.device) -> PinnedMemory:
    """Map memory in huge pages, have PyTorch's threads touch it, and register it; raises NotRegisteredError, KernelError."""
    with _entered(device) as context:
        mapped = _map(size)
        address = ctypes.addressof(ctypes.c_byte.from_buffer(mapped))
        # A byte of each page is written, as the system provides a page when it is first touched.
        torch.frombuffer(mapped, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
        driver = cuda_driver()
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        (status,) = driver.cuMemHostRegister(address, size, flags)
        if status != driver.CUresult.CUDA_SUCCESS:
            mapped.close()
            raise NotRegisteredError(f"cuMemHostRegister: {name_of(status)}")

        def free() -> None:
            driver.cuMemHostUnregister(address)
            mapped.close()

        return _made(address, size, REGISTERED, free, context)


def allocate_by_driver(size: int, device: torch.device) -> PinnedMemory:
    """Let the driver allocate memory; raises CapacityError and KernelError as `allocate` does."""
    with _entered(device) as context:
        driver = cuda_driver()
        status, host = driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise CapacityError(f"cuMemHostAlloc: {name_of(status)}")
        return _made(int(host), size, BY_DRIVER, partial(driver.cuMemFreeHost, host), context)


def _map(size: int) -> mmap.mmap:
    try:
        # Private, because huge pages of shared memory are another setting of the system.
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NotRegisteredError(f"mmap: {error.strerror}") from None
    try:
        # A page that a child process shares may be copied on the next write, and the device would keep the old one.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            mapped.madvise(advice)
    except OSError as error:  # a kernel without huge pages
        mapped.close()
        raise NotRegisteredError(f"madvise: {error.strerror}") from None
    return mapped


def _made(address: int, size: int, way: str, free: Callable[[], None], context: Any) -> PinnedMemory:
    """Describe memory that is pinned; `free` frees it in the current context."""
    (pointer,) = check(cuda_driver().cuMemHostGetDevicePointer(address, 0), "mapping pinned memory into the device")
    buffer = (ctypes.c_byte * size).from_address(address)
    # Not at exit: a thread may still be decoding then, and the end of the process frees everything.
    weakref.finalize(buffer, _free, free, context).atexit = False
    return PinnedMemory(buffer, int(pointer), way)


def _free(free: Callable[[], None], context: Any) -> None:
    """Free memory once the device has finished with it; the thread that drops the last reference runs this."""
    driver = cuda_driver()
    driver.cuCtxPushCurrent(context)
    driver.cuCtxSynchronize()
    free()
    driver.cuCtxPopCurrent()


@contextmanager
def _entered(device: torch.device) -> Generator[Any]:
    """Make the primary context of a CUDA device, to which PyTorch's memory belongs, current meanwhile."""
    driver = cuda_driver()
    check(driver.cuInit(0), "starting the CUDA driver")
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    (gpu,) = check(driver.cuDeviceGet(ordinal), f"opening CUDA device {ordinal}")
    (context,) = check(driver.cuDevicePrimaryCtxRetain(gpu), f"opening CUDA device {ordinal}")
    check(driver.cuCtxPushCurrent(context), "entering the CUDA context")
    try:
        yield context
    finally:
        driver.cuCtxPopCurrent()


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
