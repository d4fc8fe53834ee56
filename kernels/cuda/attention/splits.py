"""Cuts attention on the GPU into CTAs, and provides the scratch memory for their partial results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# As in attend_arguments.cuh and attend.cu.
WARPS = 4
THREADS = 32 * WARPS
TILE_ROWS = 16  # rows that a warp takes at once
MAX_SPLITS = 128
SCALAR_SHARED_BYTES = 4224  # float32 rows stay in registers

WINDOW_ROWS_OF_A_SPLIT = 128  # two tiles of 16 rows a warp: such a CTA ends before any CTA that reads host memory
MAX_WINDOW_SPLITS = 32
MAX_RETRIEVAL_SPLITS = MAX_SPLITS - MAX_WINDOW_SPLITS
MIN_DENSE_SPLITS = 8  # requests of a batch differ in length: the longest must not be left to a few CTAs
MIN_SHORT_SPLITS = 4  # least splits of dense rows where requests are dense only while they are short

FEW_ENTRIES = 256  # up to so many, a CTA takes one tile: partial results stay few, and more CTAs read from the host
ROWS_OF_A_FULL_SPLIT = 512  # rows of a split if a batch fills the GPU several times over


@dataclass(frozen=True)
class HeadTiles:
    """Tiles of the query heads of a KV head, one for each CTA, cut as in attend_arguments.cuh."""

    heads: int  # query heads of a tile, some of them unused
    tiles: int
    resident_ctas: int  # CTAs that a multiprocessor is meant to hold at once
    shared_bytes: int  # dynamic shared memory of a CTA

    @classmethod
    def of(cls, dtype: torch.dtype, head_dim: int, group_size: int) -> HeadTiles:
        """Compute the tiles of the kernel that is compiled for these sizes."""
        stride = 2 * head_dim * dtype.itemsize + 16  # bytes of a row in shared memory
        if dtype is torch.float32:
            most = min(group_size, 8 if head_dim <= 128 else 4)
            heads = next(size for size in (1, 2, 4, 8) if size >= most)
            return cls(heads, -(-group_size // heads), 2, SCALAR_SHARED_BYTES)
        heads = 16 if group_size > 8 and head_dim <= 128 else 8
        stages = 3 if head_dim <= 64 else 2 if head_dim <= 128 else 1  # tiles of 16 rows that each warp copies ahead
        return cls(heads, -(-group_size // heads), 3 if head_dim <= 128 else 2, WARPS * stages * TILE_ROWS * stride)


@dataclass(frozen=True)
class Splits:
    """CTAs that share the rows of one request and head tile; fixed for a batch size."""

    retrieval: int  # CTAs for a dense request's retrieval rows
    window: int
    selected: int  # of the `retrieval` CTAs, those that share a sparse request's rows; the others return at once

    @property
    def total(self) -> int:
        """Partial results that are merged."""
        return self.retrieval + self.window

    @classmethod
    def plan(cls, lists: int, window_rows: int, entries: int, resident_ctas: int, retrieval: int | None) -> Splits:
        """Choose the splits of a launch.

        The window gets a CTA per 128 rows. Selected rows get a CTA per 64 rows, a tile for each of its warps, or a CTA per 16
        rows if they are few, so that all of them are read at once. If these are more CTAs than the GPU holds at once, window
        and selected rows share that number in proportion to their rows. Dense rows get as many CTAs as the GPU holds beside
        the window's CTAs, so that a dense scan is one wave of equal parts. A CTA without rows returns at once.

        Parameters
        ----------
        lists : int
            Requests times KV heads times head tiles of the batch.
        entries : int
            Selected rows of a KV head; 0: all requests are dense.
        resident_ctas : int
            CTAs that the whole GPU holds at once.
        retrieval : int or None
            CTAs for retrieval rows, instead of the chosen number; None: choose.
        """
        window = min(-(-window_rows // WINDOW_ROWS_OF_A_SPLIT), MAX_WINDOW_SPLITS)
        room = resident_ctas // lists
        selected = 0
        if entries:
            selected, window = _share(entries, window_rows, window, room)
        if retrieval is None:
            least = max(selected, MIN_SHORT_SPLITS) if entries else MIN_DENSE_SPLITS
            retrieval = min(max(least, room - window), MAX_RETRIEVAL_SPLITS)
        return cls(retrieval, window, min(selected, retrieval))


def _share(entries: int, window_rows: int, window: int, room: int) -> tuple[int, int]:
    """Divide the `room` CTAs of one wave between the selected rows and the window, for which `window` CTAs are wanted."""
    of_a_split = TILE_ROWS if entries <= FEW_ENTRIES else WARPS * TILE_ROWS
    selected = min(-(-entries // of_a_split), MAX_RETRIEVAL_SPLITS)
    if selected + window <= room:
        return selected, window
    rows = entries + window_rows
    total = room if room >= 2 else max(2, -(-rows // ROWS_OF_A_FULL_SPLIT))
    selected = min(max(1, round(total * entries / rows)), total - 1, selected)
    return selected, min(total - selected, window)


@dataclass(frozen=True)
class ScratchSize:
    """Sizes, in numbers, of the three arrays of AttentionScratch that one launch needs at most."""

    partials: int
    statistics: int
    arrivals: int


class AttentionScratch:
    """Scratch memory for the partial results of one launch. Layers run one after the other, so they may share it.

    Attributes
    ----------
    partials : Tensor, float32
        Unnormalised outputs of every split.
    statistics : Tensor, float32
        Largest score and sum of weights of every split and head.
    arrivals : Tensor, int32
        Number of splits that are done; zeros between launches.
    """

    def __init__(self, size: ScratchSize, device: torch.device) -> None:
        self.size = size
        self.partials = torch.empty(size.partials, dtype=torch.float32, device=device)
        self.statistics = torch.empty(size.statistics, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(size.arrivals, dtype=torch.int32, device=device)

    def holds(self, size: ScratchSize) -> bool:
        """Whether launches of such a size may use this scratch memory."""
        own = self.size
        fits = own.partials >= size.partials and own.statistics >= size.statistics
        return fits and own.arrivals >= size.arrivals

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(array.nbytes for array in (self.partials, self.statistics, self.arrivals))


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's data for a kernel argument; None is the null pointer."""
    return None if tensor is None else tensor.data_ptr()
