"""Into what units attention on the GPU cuts the rows of a request, and the scratch memory for their partial results."""

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

WINDOW_ROWS = 128  # of a unit: two tiles of 16 rows a warp
MAX_WINDOW_SPLITS = 32
MAX_RETRIEVAL_SPLITS = MAX_SPLITS - MAX_WINDOW_SPLITS

DENSE_ROWS = 512  # least rows of a unit of dense rows
FEW_ENTRIES = 512  # up to so many, a unit is a tile for each of a CTA's warps: more of them read from the host at once
FEW_SELECTED_ROWS, SELECTED_ROWS = 64, 128  # least rows of a unit of selected rows


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
    """How the rows of a list, a (request, KV head) and a tile of its query heads, are cut into units (attend.cu).

    A unit is a CTA's work. The units of a request follow from its own numbers and from the GPU, not from the batch, and so does
    the order in which its rows are summed. The window has a unit per 128 rows.

    Attributes
    ----------
    dense : int
        Most units of dense rows: with the window's as many as the GPU holds at once for one request.
    dense_rows : int
        Least rows of such a unit.
    selected_rows : int
        Rows of a unit of selected rows.
    most : int
        Most units of a list.
    """

    dense: int
    dense_rows: int
    selected_rows: int
    most: int

    @classmethod
    def plan(cls, lists: int, window_rows: int, entries: int, resident_ctas: int, dense: int | None) -> Splits:
        """Choose the units.

        Parameters
        ----------
        lists : int
            Lists of one request.
        entries : int
            Selected rows of a KV head; 0: all requests are dense.
        resident_ctas : int
            CTAs that the whole GPU holds at once.
        dense : int or None
            Most units of dense rows, instead of the chosen number; None: choose.
        """
        window = min(-(-window_rows // WINDOW_ROWS), MAX_WINDOW_SPLITS)
        if dense is None:
            dense = min(max(1, resident_ctas // lists - window), MAX_RETRIEVAL_SPLITS)
        few = FEW_SELECTED_ROWS if entries <= FEW_ENTRIES else SELECTED_ROWS
        selected_rows = max(few, -(-entries // MAX_RETRIEVAL_SPLITS // TILE_ROWS) * TILE_ROWS)
        return cls(dense, DENSE_ROWS, selected_rows, window + max(dense, -(-entries // selected_rows)))


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
        Unnormalised outputs of every unit.
    statistics : Tensor, float32
        Largest score and sum of weights of every unit and head.
    arrivals : Tensor, int32
        Number of units of each list that are done; zeros between launches.
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
