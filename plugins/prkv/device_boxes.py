"""Boxes of pages on the GPU: the reference's arrays, filled by CUDA kernels."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

from torch import Tensor

from kvseek.plugins.contract import IndexContext
from kvseek.plugins.shared.arguments import pointers

from .device_arguments import publish_fields, select_fields
from .observe import require_rows
from .summaries import Boxes

BOX_THREADS = 256


class BoxArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_boxes and _join, as in boxes.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "table", "boxes", "pending")),
        *((name, c_int64) for name in ("head_stride", "token_stride")),
        *((name, c_int32) for name in ("kv_heads", "tokens", "first")),
    )


class SelectArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_select with boxes, as in select.cuh."""

    _fields_ = select_fields(("boxes",), (("near", ctypes.c_float), ("far", ctypes.c_float)))


class PublishArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_publish with boxes, as in update.cu."""

    _fields_ = publish_fields(("new_boxes",), ("boxes",))


class CudaBoxes(Boxes):
    """Boxes that equal the reference's."""

    select_arguments, publish_arguments = SelectArguments, PublishArguments

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.cuda is not None, "made by an index of CUDA kernels"
        self._kernels = context.cuda

    def selected(self) -> dict[str, Any]:
        """Return what a selection is given, by the names of its arguments."""
        radius = self.config.box_radius
        return {**pointers(self, "boxes"), "near": (1 + radius) / 2, "far": (1 - radius) / 2}

    def exchanged(self, new_boxes: Tensor | None) -> dict[str, int]:
        """Return what the publication of an update is given, by the names of its arguments."""
        assert new_boxes is not None, "an update computes the boxes"
        return {**pointers(self, "boxes"), "new_boxes": new_boxes.data_ptr()}

    def build(self, slot: int, keys: Tensor) -> None:
        """See Summaries.build."""
        if keys.shape[1]:
            self.append(slot, 0, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Summaries.append. Writes the boxes of new pages, and the box of the keys that are to join the last page."""
        require_rows("keys", keys, self.context.dtype)
        arguments = self._arguments(slot, start)
        arguments.keys, arguments.tokens = keys.data_ptr(), keys.shape[1]
        arguments.head_stride, arguments.token_stride = keys.stride(0), keys.stride(1)
        items = (keys.shape[1] // self.config.page + 2) * self.context.head_dim // 8
        grid = (-(-items // BOX_THREADS), self.context.num_kv_heads, 1)
        self._kernels.launch("kvseek_prkv_boxes", grid, BOX_THREADS, arguments)

    def publish(self, slot: int, start: int) -> None:
        """See Summaries.publish. Lets keys join the page that earlier keys began. The length alone makes new pages visible."""
        if start % self.config.page:
            grid = (self.context.num_kv_heads, 1, 1)
            self._kernels.launch("kvseek_prkv_join", grid, self.context.head_dim, self._arguments(slot, start))

    def _arguments(self, slot: int, start: int) -> BoxArguments:
        return BoxArguments(
            table=self.context.extents.device_table[slot].data_ptr(),
            boxes=self.boxes.data_ptr(),
            pending=self.pending[slot].data_ptr(),
            kv_heads=self.context.num_kv_heads,
            first=start,
        )
