"""Rows of the retrieval regions: those of the first layers on the device, those of the other layers in host memory.

Host memory is pinned for a GPU, so that kernels read rows through unified virtual addressing and copies overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.extents import Span
from kvseek.core.index_context import LayerRows
from kvseek.engine.cache.host_memory import PinnedMemory, allocate, available_bytes, check, cuda_driver
from kvseek.engine.cache.memory_layout import RowLayout
from kvseek.kernels.reference.attention.rounded_rows import SCALE_DTYPE, round_rows, widen_rows

PINNED_RESERVE_BYTES = 1 << 30  # left to the system: pinned pages cannot be swapped or reclaimed
MAX_PITCH_BYTES = 2**31 - 1  # largest stride of a copy, which drivers report as CU_DEVICE_ATTRIBUTE_MAX_PITCH

ROUNDED_AT_ONCE = 1 << 24  # numbers, which are float32 for a moment
STAGED_EXTENTS = 8  # extents of a layer that are copied to the device before their rows are read there


@dataclass(frozen=True)
class RowForm:
    """How the rows of an extent and KV head lie in memory, a *block*: rows [1024, 2, D], then scales, if they are rounded.

    Attributes
    ----------
    engine_dtype : dtype
        Of rows that are not rounded.
    rounded : bool
        Rows are integers of 8 bits with scales (kernels/reference/attention/rounded_rows.py).
    """

    kv_heads: int
    head_dim: int
    engine_dtype: torch.dtype
    rounded: bool

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers of a block."""
        return torch.int8 if self.rounded else self.engine_dtype

    def shape(self, layers: int, extents: int) -> tuple[int, ...]:
        """Return the shape of the blocks of some layers and extents."""
        numbers = self.head_dim + (SCALE_DTYPE.itemsize if self.rounded else 0)
        return layers, extents, self.kv_heads, EXTENT_TOKENS * 2 * numbers

    def planes(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Return views of blocks: rows [extents, layers, G, 1024, 2, D] and, if these are rounded, scales [..., 1024, 2]."""
        rows = _plane(blocks, 0, (2, self.head_dim))
        if not self.rounded:
            return (rows,)
        first = EXTENT_TOKENS * 2 * self.head_dim // SCALE_DTYPE.itemsize
        return rows, _plane(blocks.view(SCALE_DTYPE), first, (2,))


def _plane(blocks: Tensor, first: int, of_row: tuple[int, ...]) -> Tensor:
    """Return what blocks [layers, extents, G, n] hold from number `first` on, [extents, layers, G, 1024, *of_row].

    Kernels rely on the strides of dimensions of size 1 too, which other views would choose as they like.
    """
    layers, extents, heads, size = blocks.shape
    inner = torch.empty(EXTENT_TOKENS, *of_row, device="meta").stride()
    shape = (extents, layers, heads, EXTENT_TOKENS, *of_row)
    strides = (heads * size, extents * heads * size, size, *inner)
    return blocks.as_strided(shape, strides, blocks.storage_offset() + first)


class HostPool:
    """Rows of the layers that lie in host memory, one address range.

    Attributes
    ----------
    blocks : Tensor [layers, extents, G, n], on the CPU
        See RowForm. The layers are outermost, because a layer's rows are read together: a GPU takes longer for addresses that
        lie further apart (docs/gpu.md, "Addresses of host memory"). Pinned memory is freed when the last tensor over it is.
    planes : tuple of Tensor
        Views of the blocks, see RowForm.planes.
    device_pointer : int
        Address of the first row for kernels of the device; for the CPU, the address of the tensor.
    pinned : bool
        Whether a CUDA device can read the rows.
    way : str or None
        How pinned memory was allocated, see PinnedMemory.
    """

    def __init__(self, form: RowForm, layers: int, extents: int, device: torch.device) -> None:
        """Allocate the pool for kernels of `device`: pinned for a CUDA device.

        Raises
        ------
        CapacityError
            If host memory does not suffice.
        """
        shape, dtype = form.shape(layers, extents), form.dtype
        self.pinned = device.type == "cuda" and math.prod(shape) > 0  # the driver allocates no empty ranges
        self.way: str | None
        if self.pinned:
            memory = _pin(math.prod(shape) * dtype.itemsize, device)
            self.device_pointer, self.way = memory.device_pointer, memory.way
            self.blocks = torch.frombuffer(memory.buffer, dtype=dtype).view(shape)
        else:
            self.blocks = _pageable(shape, dtype)
            self.device_pointer, self.way = self.blocks.data_ptr(), None
        self.planes = form.planes(self.blocks)

    @property
    def rows(self) -> Tensor:
        """Keys and values, [extents, layers, G, 1024, 2, D]."""
        return self.planes[0]

    def write(self, extent: int, first_layer: int, inside: slice, parts: Sequence[Tensor]) -> None:
        """Copy rows to places `inside` of an extent, in layers first_layer, first_layer + 1, ...

        Parameters
        ----------
        parts : Tensors [layers, G, tokens, 2, ...], one for each of `planes`
            On the CPU; for a pinned pool they may be on the device. A copy engine then copies them, on the current stream,
            and the rows of all (layer, KV head) must be equally spaced.
        """
        layers = slice(first_layer, first_layer + parts[0].shape[0])
        for plane, rows in zip(self.planes, parts, strict=True):
            target = plane[extent, layers, :, inside]
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
        """Copy rows [layers, G, n, 2, ...] from the device, each (layer, KV head) `pitch` bytes after the one before."""
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
        copy.dstPitch = target.stride(1) * target.element_size()
        copy.dstHeight = target.stride(0) // target.stride(1)
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
    device_planes : tuple of Tensor, on the device
        As HostPool.planes, of the device layers.
    pool : HostPool
        Rows of the other layers.
    """

    def __init__(self, config: EngineConfig, dtype: torch.dtype, device: torch.device, layout: RowLayout) -> None:
        """Allocate the rows; raises CapacityError if the memory of host or device does not suffice."""
        self.layout, self._device = layout, device
        model, rounded = config.model, config.cache.row_dtype == "int8"
        self._form = RowForm(model.num_kv_heads, model.head_dim, dtype, rounded)
        self.pool = HostPool(self._form, layout.host_layers, layout.capacity, device)
        self._device_blocks = _device_blocks(self._form, layout, device)
        self.device_planes = self._form.planes(self._device_blocks)

    @property
    def device_rows(self) -> Tensor:
        """Keys and values on the device, [extents, device layers, G, 1024, 2, D]."""
        return self.device_planes[0]

    def of_layer(self, layer: int) -> LayerRows:
        """Return the place of a layer's rows in memory, for its index and its attention."""
        layout, on_device = self.layout, layer < self.layout.device_layers
        planes, number = (self.device_planes, layer) if on_device else (self.pool.planes, layer - layout.device_layers)
        base = self.device_rows.data_ptr() if on_device else self.pool.device_pointer
        pointer = base + number * layout.capacity * layout.layer_bytes
        rows, *scales = (plane[:, number] for plane in planes)
        return LayerRows(rows, pointer, layout.layer_bytes // rows.element_size(), *scales)

    def write(self, first_layer: int, rows: Tensor, spans: Sequence[Span]) -> None:
        """Write rows [layers, G, n, 2, D] of layers first_layer, ... on the current stream."""
        if self._form.rounded:
            self._write_rounded(first_layer, rows, spans)
            return
        for extent, inside, source in spans:
            self._write_piece(extent, first_layer, inside, (rows[:, :, source],))

    def _write_rounded(self, first_layer: int, rows: Tensor, spans: Sequence[Span]) -> None:
        """Write rows that are rounded in few large pieces, as each takes a dozen launches on a GPU."""
        span_numbers = rows[0, :, :EXTENT_TOKENS].numel()  # of a layer, at most
        some_layers = max(1, min(rows.shape[0], ROUNDED_AT_ONCE // max(1, span_numbers)))
        some_spans = max(1, ROUNDED_AT_ONCE // max(1, some_layers * span_numbers))
        for layer in range(0, rows.shape[0], some_layers):
            for number in range(0, len(spans), some_spans):
                own = spans[number : number + some_spans]
                start, stop = own[0][2].start, own[-1][2].stop
                parts = round_rows(rows[layer : layer + some_layers, :, start:stop])
                for extent, inside, source in own:
                    piece = [part[:, :, source.start - start : source.stop - start] for part in parts]
                    self._write_piece(extent, first_layer + layer, inside, piece)

    def _write_piece(self, extent: int, first_layer: int, inside: slice, parts: Sequence[Tensor]) -> None:
        d, layers = self.layout.device_layers, parts[0].shape[0]
        on_device = min(max(0, d - first_layer), layers)
        if on_device:
            for plane, part in zip(self.device_planes, parts, strict=True):
                plane[extent, first_layer : first_layer + on_device, :, inside] = part[:on_device]
        if on_device < layers:
            self.pool.write(extent, first_layer + on_device - d, inside, [part[on_device:] for part in parts])

    def runs(self, layer: int, extents: Sequence[int]) -> Iterator[Tensor]:
        """Yield a layer's rows of extents, in order, where the engine computes; they must not be written to.

        Each is of one extent or of several, [extents, G, 1024, 2, D]. A GPU gets copies of rows in host memory, made on the
        current stream; its allocator counts at most 2 x STAGED_EXTENTS at a time, unless the caller keeps them. Rows of 8 bits
        are widened to such copies on any device.
        """
        pool, rounded = self.of_layer(layer).pool, self._form.rounded
        there = not rounded and pool.device.type == self._device.type
        first = 0
        while first < len(extents):
            last = first + 1
            if there:  # neighbours in the pool, as they lie
                while last < len(extents) and extents[last] == extents[last - 1] + 1:
                    last += 1
                yield pool[extents[first] : extents[last - 1] + 1]
            else:
                last = min(first + STAGED_EXTENTS, len(extents))
                staged = torch.empty(
                    (last - first, *pool.shape[1:]), dtype=self._form.engine_dtype, device=self._device
                )
                for target, extent in zip(staged, extents[first:last], strict=True):
                    if rounded:
                        own, scales = self._block(layer, extent)
                        widen_rows(own, scales, out=target)
                    else:
                        target.copy_(pool[extent], non_blocking=True)
                yield staged
            first = last

    def _block(self, layer: int, extent: int) -> tuple[Tensor, ...]:
        """Return rows [G, 1024, 2, D] and scales of an extent on the device, in one copy: in host memory a plane has gaps."""
        on_device = layer < self.layout.device_layers
        blocks, number = (
            (self._device_blocks, layer) if on_device else (self.pool.blocks, layer - self.layout.device_layers)
        )
        there = blocks[number, extent].to(self._device, non_blocking=True)
        return tuple(plane[0, 0] for plane in self._form.planes(there[None, None]))

    def blocks(self, layer: int, extents: Sequence[int]) -> Iterator[Tensor]:
        """Yield what `runs` yields extent by extent, each [G, 1024, 2, D]."""
        for run in self.runs(layer, extents):
            yield from run


def _device_blocks(form: RowForm, layout: RowLayout, device: torch.device) -> Tensor:
    try:
        return torch.empty(form.shape(layout.device_layers, layout.capacity), dtype=form.dtype, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise CapacityError(
            f"cannot allocate {layout.device_bytes:,} bytes on {device} for the rows of {layout.device_layers} layers and "
            f"{layout.capacity * EXTENT_TOKENS:,} tokens ({str(error).splitlines()[0]}); lower "
            "cache.kv_cache_device_memory_bytes, max_batch_size or max_seq_len, or choose offload 'always'"
        ) from None
