"""Rows of the retrieval regions: those of the first layers on the device, those of the other layers in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.extents import Span
from kvseek.core.index_context import LayerRows

from .host_pool import HostPool
from .memory_layout import RowLayout

STAGED_EXTENTS = 8  # extents of a layer that are copied to the device before their rows are read there


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
