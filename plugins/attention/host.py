"""Attention of one layer on the CPU: over its window and its rows, by the compiled kernel or by the reference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.plugins.batch import Batch
from kvseek.plugins.selection import Selection

from . import native, reference


@dataclass(frozen=True)
class HostAttention:
    """Attention of one layer of a cache on the CPU; an Attention of plugins/contract.py.

    Attributes
    ----------
    window : Tensor [slots, G, window, 2, D]
        Window rows, K then V.
    rows : Tensor [extents, G, 1024, 2, D]
        The layer's part of the row pool (strided by extent).
    sink : int
        Capacity of the sink: the ring starts at window row `sink`.
    scaling : float
        Softmax scale.
    library : CpuLibrary or None
        Compiled kernels; None runs the reference.
    """

    window: Tensor
    rows: Tensor
    sink: int
    scaling: float
    library: CpuLibrary | None

    def __call__(self, queries: Tensor, batch: Batch, selection: Selection | None) -> Tensor:
        """See Attention. With a selection no request of the batch may be dense."""
        where = (queries, batch, selection, self.window, self.rows)
        if self.library is None:
            return reference.attend(*where, sink=self.sink, scaling=self.scaling)
        return native.attend(*where, sink=self.sink, scaling=self.scaling, library=self.library)
