"""How attention on the GPU is cut into CTAs, and the scratch memory that their partial results need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# As in attend_arguments.cuh and attend.cu.
WARPS = 4
THREADS = 32 * WARPS
STAGED_ROWS = 16  # selected rows that a CTA copies at once
MAX_SPLITS = 128

WINDOW_ROWS_OF_A_SPLIT = 128  # two tiles of 16 rows for each of four warps: done before any CTA that waits for the host
MAX_WINDOW_SPLITS = 32
MAX_RETRIEVAL_SPLITS = MAX_SPLITS - MAX_WINDOW_SPLITS
MIN_DENSE_SPLITS = 8  # requests of a batch differ in length: the longest must not be left to a few CTAs


@dataclass(frozen=True)
class HeadTiles:
    """How the query heads of a KV head are cut into what one CTA serves, as attend_arguments.cuh does it."""

    heads: int  # of a tile, some of them unused
    tiles: int
    resident_ctas: int  # CTAs that a multiprocessor is meant to hold at once
    shared_bytes: int  # dynamic shared memory of a CTA

    @classmethod
    def of(cls, dtype: torch.dtype, head_dim: int, group_size: int) -> HeadTiles:
        """Tiles of a kernel's specialisation."""
        stride = 2 * head_dim * dtype.itemsize + 16  # bytes of a row in shared memory
        if dtype is torch.float32:
            most = min(group_size, 8 if head_dim <= 128 else 4)
            heads = next(size for size in (1, 2, 4, 8) if size >= most)
            return cls(heads, -(-group_size // heads), 2, STAGED_ROWS * stride)
        heads = 16 if group_size > 8 and head_dim <= 128 else 8
        stages = 3 if head_dim <= 64 else 2 if head_dim <= 128 else 1  # tiles of 16 rows that each warp copies ahead
        return cls(heads, -(-group_size // heads), 3 if head_dim <= 128 else 2, WARPS * stages * 16 * stride)


@dataclass(frozen=True)
class Splits:
    """CTAs that share the rows of one request and head tile; fixed for a batch size."""

    retrieval: int
    window: int

    @property
    def total(self) -> int:
        """Partial results that are merged."""
        return self.retrieval + self.window

    @classmethod
    def plan(cls, lists: int, window_rows: int, entries: int, resident_ctas: int, retrieval: int | None) -> Splits:
        """Choose the splits of a launch.

        The window gets a CTA per 128 rows. The retrieval rows get as many CTAs as the GPU holds at once beside those, so
        that a dense scan is one wave of equal parts; at least one per 16 selected rows, so that all of them are under
        way at once; at least 8 if nothing is ever selected. A CTA without rows leaves at once.

        Parameters
        ----------
        lists : int
            Requests times KV heads times head tiles of the batch.
        entries : int
            Selected rows of a KV head; 0: all requests are dense.
        resident_ctas : int
            CTAs that the whole GPU holds at once.
        retrieval : int or None
            Overrides the choice.
        """
        window = min(-(-window_rows // WINDOW_ROWS_OF_A_SPLIT), MAX_WINDOW_SPLITS)
        if retrieval is None:
            needed = -(-entries // STAGED_ROWS) if entries else MIN_DENSE_SPLITS
            retrieval = min(max(needed, resident_ctas // lists - window), MAX_RETRIEVAL_SPLITS)
        return cls(retrieval, window)


@dataclass(frozen=True)
class ScratchSize:
    """What one launch needs at most: numbers of the three arrays of AttentionScratch."""

    partials: int
    statistics: int
    arrivals: int


class AttentionScratch:
    """Partial results of one launch. Layers run one after the other, so they may share it.

    Attributes
    ----------
    partials : Tensor, float32
        Unnormalised outputs of every split.
    statistics : Tensor, float32
        Largest score and sum of weights of every split and head.
    arrivals : Tensor, int32
        Splits that are done; zeros between launches.
    """

    def __init__(self, size: ScratchSize, device: torch.device) -> None:
        self.size = size
        self.partials = torch.empty(size.partials, dtype=torch.float32, device=device)
        self.statistics = torch.empty(size.statistics, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(size.arrivals, dtype=torch.int32, device=device)

    def holds(self, size: ScratchSize) -> bool:
        """Whether launches of such a size may use it."""
        own = self.size
        fits = own.partials >= size.partials and own.statistics >= size.statistics
        return fits and own.arrivals >= size.arrivals

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(array.nbytes for array in (self.partials, self.statistics, self.arrivals))


def address(tensor: Tensor | None) -> int | None:
    """Address of a tensor's data for a kernel argument; None is the null pointer."""
    return None if tensor is None else tensor.data_ptr()
