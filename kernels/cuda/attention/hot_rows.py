"""Hot rows: copies, on the device, of the rows that each slot's last steps selected from a pool in host memory.

Selections change slowly, and rows cross PCIe much more slowly than they are read on the device. The attention kernel looks up,
reads and writes the copies (hot_rows.cuh says how); here is their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.extents import ExtentTable
from kvseek.kernels.reference.attention.rounded_rows import SCALE_DTYPE

NO_FRAME = -1  # bits 0xffff, as FrameNumber of attend_arguments.cuh
MOST_FRAMES = 2**16 - 1


def empty_frames(extents: ExtentTable, kv_heads: int) -> Tensor:
    """Allocate frame numbers for all rows of a layer's pool: int16 [extents, G, 1024], on the device of `extents`.

    The kernels read them as unsigned numbers of 16 bits. A row's number is that of the frame to which a row in this place of the
    pool was copied last, perhaps for another request; or NO_FRAME.
    """
    shape = (extents.capacity, kv_heads, EXTENT_TOKENS)
    return torch.full(shape, NO_FRAME, dtype=torch.int16, device=extents.device)


@dataclass(frozen=True)
class HotRows:
    """Copies of one layer's rows. A *frame* is room for one row; a slot and KV head has a buffer of `entries` frames a step.

    Attributes
    ----------
    frames : Tensor, int16 [extents, G, 1024]
        See `empty_frames`.
    rows : Tensor [slots, G, buffers, entries, 2, D]
        Of the type of the pool's rows.
    places : Tensor, int32 [slots, G, buffers, entries]
        Place of the row that a frame holds, or -1.
    hits : Tensor, int64 [slots, G, 2]
        Selected rows since the start that were found, and that were read from the pool.
    frame_step : int
        Entries of `frames` by which each slot's number of a row is moved, as slots may share extents; 0: they do not.
    scales : Tensor, bfloat16 [slots, G, buffers, entries, 2], or None
        Of rows in 8 bits.
    """

    frames: Tensor
    rows: Tensor
    places: Tensor
    hits: Tensor
    frame_step: int = 0
    scales: Tensor | None = None

    @classmethod
    def make(
        cls,
        frames: Tensor,
        *,
        slots: int,
        entries: int,
        steps: int,
        head_dim: int,
        dtype: torch.dtype,
        shared: bool = False,
    ) -> Self:
        """Allocate room for `steps` steps that select `entries` rows each; see `fitting_steps`.

        `shared` says whether slots may share extents. A dtype of int8 stands for rows in 8 bits.
        """
        device, kv_heads = frames.device, frames.shape[1]
        shape = (slots, kv_heads, steps + 1, entries)
        return cls(
            frames,
            torch.empty((*shape, 2, head_dim), dtype=dtype, device=device),
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.zeros((slots, kv_heads, 2), dtype=torch.int64, device=device),
            frames.numel() // slots if shared else 0,
            torch.empty((*shape, 2), dtype=SCALE_DTYPE, device=device) if dtype is torch.int8 else None,
        )

    def forget(self, slot: int) -> None:
        """Forget the rows of a slot that gets another request. Call it between steps; runs on the current stream."""
        self.places[slot].fill_(-1)


def hit_rate(layers: Sequence[HotRows]) -> float | None:
    """Return the share of the selected rows of some layers that were found; None before any. Waits for the device once."""
    if not layers:
        return None
    found, read = torch.stack([hot.hits for hot in layers]).sum(dim=(0, 1, 2)).tolist()
    return found / (found + read) if found + read else None


def fitting_steps(entries: int, steps: int) -> int:
    """Return how many of `steps` steps with `entries` selected rows can be kept: there are 65,535 frame numbers."""
    return max(0, min(steps, MOST_FRAMES // entries - 1)) if entries else 0
