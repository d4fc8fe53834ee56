"""The row pool in host memory: pinned, so that kernels read rows through unified virtual addressing and copies overlap."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.errors import CapacityError

from .host_memory import available_bytes
from .pinned_memory import PinnedMemory, allocate, check, cuda_driver

PINNED_RESERVE_BYTES = 1 << 30  # left to the system: pinned pages cannot be swapped or reclaimed
MAX_PITCH_BYTES = 2**31 - 1  # largest stride of a copy, which drivers report as CU_DEVICE_ATTRIBUTE_MAX_PITCH


class HostPool:
    """Rows of the layers that lie in host memory, one address range.

    Attributes
    ----------
    rows : Tensor [extents, layers, G, 1024, 2, D], on the CPU
        K then V of each token and KV head. In memory the layers are outermost, because a layer's rows are read together: a GPU
        takes longer for addresses that lie further apart (docs/gpu.md, "Addresses of host memory"). Pinned memory is freed when
        the last tensor over it is.
    device_pointer : int
        Address of `rows` for kernels of the device; for the CPU, the address of the tensor.
    pinned : bool
        Whether a CUDA device can read the rows.
    way : str or None
        How pinned memory was allocated, see PinnedMemory.
    """

    def __init__(
        self, extents: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the pool for kernels of `device`: pinned for a CUDA device.

        Raises
        ------
        CapacityError
            If host memory does not suffice.
        """
        shape = (layers, extents, kv_heads, EXTENT_TOKENS, 2, head_dim)
        self.pinned = device.type == "cuda" and math.prod(shape) > 0  # the driver allocates no empty ranges
        self.way: str | None
        self._row_bytes = 2 * head_dim * dtype.itemsize
        if self.pinned:
            memory = _pin(math.prod(shape) * dtype.itemsize, device)
            self.device_pointer, self.way = memory.device_pointer, memory.way
            rows = torch.frombuffer(memory.buffer, dtype=dtype).view(shape)
        else:
            rows = _pageable(shape, dtype)
            self.device_pointer, self.way = rows.data_ptr(), None
        self.rows = rows.transpose(0, 1)

    def write(self, extent: int, first_layer: int, inside: slice, rows: Tensor) -> None:
        """Copy rows to places `inside` of an extent, in layers first_layer, first_layer + 1, ...

        Parameters
        ----------
        rows : Tensor [layers, G, tokens, 2, D]
            On the CPU; for a pinned pool they may be on the device. A copy engine then copies them, on the current stream,
            and the rows of all (layer, KV head) must be equally spaced.
        """
        layers = slice(first_layer, first_layer + rows.shape[0])
        target = self.rows[extent, layers, :, inside]
        if target.shape != rows.shape or target.dtype != rows.dtype:
            raise ValueError(f"rows {tuple(rows.shape)} {rows.dtype}: must be {tuple(target.shape)} {target.dtype}")
        if not target.numel():
            return
        if self.pinned:
            self._copy_from_device(target, rows)
        else:
            target.copy_(rows)

    def _copy_from_device(self, target: Tensor, rows: Tensor) -> None:
        layers, heads = rows.shape[:2]
        runs = rows.view(layers * heads, -1)
        pitch = runs.stride(0) * runs.element_size()
        if pitch <= MAX_PITCH_BYTES:
            self._copy_runs(target, rows, pitch)
            return
        for layer, head in itertools.product(range(layers), range(heads)):
            one = slice(layer, layer + 1), slice(head, head + 1)
            self._copy_runs(target[one], rows[one], 0)

    def _copy_runs(self, target: Tensor, rows: Tensor, pitch: int) -> None:
        """Copy rows [layers, G, n, 2, D] from the device, each (layer, KV head) `pitch` bytes after the one before."""
        layers, heads = rows.shape[:2]
        width = rows[0, 0].numel() * rows.element_size()
        driver = cuda_driver()
        copy = driver.CUDA_MEMCPY3D()
        copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice = rows.data_ptr()
        # The pitch of a single run means nothing and may be out of bounds.
        copy.srcPitch, copy.srcHeight = (pitch, heads) if layers * heads > 1 else (width, 1)
        copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.dstHost = target.data_ptr()
        # Heads of an extent are next to each other; from a layer to the next there are those of all extents.
        copy.dstPitch, copy.dstHeight = EXTENT_TOKENS * self._row_bytes, self.rows.shape[0] * self.rows.shape[2]
        copy.WidthInBytes, copy.Height, copy.Depth = width, heads, layers
        check(driver.cuMemcpy3DAsync(copy, _current_stream(rows)), "copying rows to the row pool")


def can_pin(size: int, available: int) -> bool:
    """Whether a pool of `size` bytes may be pinned when `available` bytes of host memory can be allocated."""
    return size + PINNED_RESERVE_BYTES <= available


def _refusal(size: int, reason: str) -> CapacityError:
    return CapacityError(
        f"the row pool needs {size:,} bytes of host memory, {available_bytes():,} are available ({reason}); "
        "lower cache.kv_cache_host_memory_bytes, max_batch_size or max_seq_len"
    )


def _pageable(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        raise _refusal(math.prod(shape) * dtype.itemsize, str(error).splitlines()[0]) from None


def _pin(size: int, device: torch.device) -> PinnedMemory:
    if not can_pin(size, available_bytes()):  # the system would kill a process when memory is used up
        raise _refusal(size, f"{PINNED_RESERVE_BYTES:,} of them stay free")
    try:
        return allocate(size, device)
    except CapacityError as error:
        raise _refusal(size, str(error)) from None


def _current_stream(rows: Tensor) -> Any:
    return cuda_driver().CUstream(torch.cuda.current_stream(rows.device).cuda_stream)
