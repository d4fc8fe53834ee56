"""Rows of the retrieval regions: those of the first layers on the device, those of the other layers in host memory.

Host memory is pinned for a GPU, so that kernels read rows through unified virtual addressing and copies overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.extents import Span
from kvseek.core.index_context import LayerRows
from kvseek.engine.cache.host_memory import PinnedMemory, allocate, available_bytes, check, cuda_driver
from kvseek.engine.cache.memory_layout import RowLayout

PINNED_RESERVE_BYTES = 1 << 30  # left to the system: pinned pages cannot be swapped or reclaimed
MAX_PITCH_BYTES = 2**31 - 1  # largest stride of a copy, which drivers report as CU_DEVICE_ATTRIBUTE_MAX_PITCH

STAGED_EXTENTS = 8  # extents of a layer that are copied to the device before their rows are read there


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


class RowStorage:
    """The memory of the row pool. The cache's ExtentTable, not this class, knows which slot an extent belongs to.

    Attributes
    ----------
    layout : RowLayout
        Number of extents, and number of first layers whose rows lie on the device.
    device_rows : Tensor [extents, device layers, G, 1024, 2, D], on the device
        In memory the layers are outermost, as in the pool.
    pool : HostPool
        Rows of the other layers.
    """

    def __init__(self, config: EngineConfig, dtype: torch.dtype, device: torch.device, layout: RowLayout) -> None:
        """Allocate the rows; raises CapacityError if the memory of host or device does not suffice."""
        model = config.model
        self.layout, self._device = layout, device
        self.pool = HostPool(layout.capacity, layout.host_layers, model.num_kv_heads, model.head_dim, dtype, device)
        self.device_rows = _device_rows(layout, self.pool.rows.shape[2:], dtype, device)

    def of_layer(self, layer: int) -> LayerRows:
        """Return the place of a layer's rows in memory, for its index and its attention."""
        layout, on_device = self.layout, layer < self.layout.device_layers
        rows, number = (self.device_rows, layer) if on_device else (self.pool.rows, layer - layout.device_layers)
        base = self.device_rows.data_ptr() if on_device else self.pool.device_pointer
        pointer = base + number * layout.capacity * layout.layer_bytes
        return LayerRows(rows[:, number], pointer, layout.layer_bytes // rows.element_size())

    def write(self, first_layer: int, rows: Tensor, spans: Sequence[Span]) -> None:
        """Write rows [layers, G, n, 2, D] of layers first_layer, ... on the current stream."""
        d = self.layout.device_layers
        on_device = min(max(0, d - first_layer), rows.shape[0])
        for extent, inside, source in spans:
            piece = rows[:, :, source]
            if on_device:
                self.device_rows[extent, first_layer : first_layer + on_device, :, inside] = piece[:on_device]
            if on_device < rows.shape[0]:
                self.pool.write(extent, first_layer + on_device - d, inside, piece[on_device:])

    def runs(self, layer: int, extents: Sequence[int]) -> Iterator[Tensor]:
        """Yield a layer's rows of extents, in order, where the engine computes; they must not be written to.

        Each is of one extent or of several, [extents, G, 1024, 2, D]. A GPU gets copies of rows in host memory, made on the
        current stream; its allocator counts at most 2 x STAGED_EXTENTS at a time, unless the caller keeps them.
        """
        pool = self.of_layer(layer).pool
        there = pool.device.type == self._device.type
        first = 0
        while first < len(extents):
            last = first + 1
            if there:  # neighbours in the pool, as they lie
                while last < len(extents) and extents[last] == extents[last - 1] + 1:
                    last += 1
                yield pool[extents[first] : extents[last - 1] + 1]
            else:
                last = min(first + STAGED_EXTENTS, len(extents))
                staged = torch.empty((last - first, *pool.shape[1:]), dtype=pool.dtype, device=self._device)
                for target, extent in zip(staged, extents[first:last], strict=True):
                    target.copy_(pool[extent], non_blocking=True)
                yield staged
            first = last

    def blocks(self, layer: int, extents: Sequence[int]) -> Iterator[Tensor]:
        """Yield what `runs` yields extent by extent, each [G, 1024, 2, D]."""
        for run in self.runs(layer, extents):
            yield from run


def _device_rows(layout: RowLayout, row_shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        shape = (layout.device_layers, layout.capacity, *row_shape)
        return torch.empty(shape, dtype=dtype, device=device).transpose(0, 1)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise CapacityError(
            f"cannot allocate {layout.device_bytes:,} bytes on {device} for the rows of {layout.device_layers} layers and "
            f"{layout.capacity * EXTENT_TOKENS:,} tokens ({str(error).splitlines()[0]}); lower "
            "cache.kv_cache_device_memory_bytes, max_batch_size or max_seq_len, or choose offload 'always'"
        ) from None
