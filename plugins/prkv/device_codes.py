"""Codes of rows on the GPU, which score pages there: the reference's arrays, filled by a CUDA kernel."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from kvseek.plugins.codes.device import CudaCodeStore
from kvseek.plugins.contract import IndexContext
from kvseek.plugins.shared.arguments import require_numbered_rows

from .device_arguments import publish_fields, select_fields
from .summaries import Codes


class SelectArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_select with codes, as in select.cuh."""

    _fields_ = select_fields(("high", "scales", "means", "mean_steps", "signs"), (("block_bits", ctypes.c_int32),))


class PublishArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_publish with codes, as in update.cu."""

    _fields_ = publish_fields((), ("high", "scales", "means", "mean_steps", "signs"), (("block_bits", ctypes.c_int32),))


class CudaCodes(Codes):
    """Codes that equal the reference's but for channels that lie at the border of two cells up to rounding."""

    store_type = CudaCodeStore
    store: CudaCodeStore
    select_arguments, publish_arguments = SelectArguments, PublishArguments

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        require_numbered_rows("PRKV's codes on the GPU", context)

    def selected(self) -> dict[str, Any]:
        """Return what a selection is given, by the names of its arguments."""
        return self.store.arguments("high")

    def exchanged(self, new_boxes: Tensor | None) -> dict[str, int]:
        """Return what the publication of an update is given, by the names of its arguments: the codes that it makes anew."""
        return self.store.arguments("high")
