"""Draws tokens by a compiled kernel, for a whole batch at once: on the CPU, or on a GPU behind the step that makes the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from kvseek.core.streams import HostCopy

from .rows import pack_rows
from .sampling import Drawn, Sampler


class DrawKernel(Protocol):
    """NativeDraw of kernels/cpu/draw/draw.py, DeviceDraw of kernels/cuda/draw/draw.py.

    Attributes
    ----------
    work_bytes : int
        Bytes of zeros that it needs for each request.
    """

    @property
    def work_bytes(self) -> int: ...

    def __call__(self, logits: Tensor, rows: Tensor, count: int) -> Tensor:
        """Draw for `count` requests, whose DrawRows begin the uint8 tensor `rows`; int32 [count, DRAWN_WORDS]."""


class CompiledDraws:
    """Draws by a kernel; Draws of sampling.py. On a GPU the host waits in what `begin` returns, and for the draws alone."""

    def __init__(self, kernel: DrawKernel) -> None:
        self._kernel = kernel

    def begin(
        self, logits: Tensor, rows: Sequence[int], samplers: Sequence[Sampler], places: Sequence[int] = ()
    ) -> Callable[[], list[Drawn | int]]:
        """See Draws."""
        try:
            packed = pack_rows(rows, samplers, logits.device, self._kernel.work_bytes, places)
            tokens = self._kernel(logits, packed.buffer, len(packed.rows))
            copies = HostCopy([tokens, *(logits[row] for row in packed.told)])
        except Exception as error:  # too little memory, say: requests that draw nothing go on
            failed: list[Drawn | int] = [Drawn(error=error) for _ in rows]
            return lambda: failed

        def finish() -> list[Drawn | int]:
            found, *told = copies.wait()
            return packed.results(found, told)

        return finish
