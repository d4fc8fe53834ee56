"""Hot rows: copies, on the device, of the rows that each slot's last steps selected from a pool in host memory.

Selections change slowly, and a row from host memory takes as long as some 275 rows from device memory. The attention kernel looks
up, reads and writes the copies (hot_rows.cuh says how); here is their memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.extents import ExtentTable

NO_FRAME = -1  # bits 0xffff, as in plugins/shared/frames.cuh
MOST_FRAMES = 2**16 - 1

logger = logging.getLogger(__name__)


def empty_frames(extents: ExtentTable, kv_heads: int) -> Tensor:
    """Allocate the frame numbers of a layer's rows, int16 [extents, G, 1024], on the device of `extents`.

    A frame number is unsigned, in 16 bits: that of the frame that received the row last, whichever request the row was of then;
    or NO_FRAME.
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
    places : Tensor, int32 [slots, G, buffers, entries]
        Place of the row that a frame holds, or -1.
    hits : Tensor, int64 [slots, G, 2]
        Selected rows since the start that were found, and that were read from the pool.
    """

    frames: Tensor
    rows: Tensor
    places: Tensor
    hits: Tensor

    @classmethod
    def make(
        cls, frames: Tensor, *, slots: int, entries: int, steps: int, head_dim: int, dtype: torch.dtype
    ) -> Self | None:
        """Allocate the hot rows of `steps` steps that select `entries` rows each; None if frame numbers do not suffice."""
        kept = min(steps, MOST_FRAMES // entries - 1)
        if kept < steps:
            message = "%d steps of %d selected rows exceed %d frames: the device keeps the rows of %d steps"
            logger.warning(message, steps + 1, entries, MOST_FRAMES, max(kept, 0))
        if kept < 1:
            return None
        device, kv_heads = frames.device, frames.shape[1]
        shape = (slots, kv_heads, kept + 1, entries)
        return cls(
            frames,
            torch.empty((*shape, 2, head_dim), dtype=dtype, device=device),
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.zeros((slots, kv_heads, 2), dtype=torch.int64, device=device),
        )

    def forget(self, slot: int) -> None:
        """Forget the rows of a slot that gets another request. Call it between steps; runs on the current stream."""
        self.places[slot].fill_(-1)

    def hit_rate(self) -> float | None:
        """Return the share of the selected rows that were found since the start; None before any. Waits for the device."""
        found, read = self.hits.sum(dim=(0, 1)).tolist()
        return found / (found + read) if found + read else None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(array.nbytes for array in (self.frames, self.rows, self.places, self.hits))
