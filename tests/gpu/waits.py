"""Work on side streams that comes late, and a host that must not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvseek.core.streams import SideStream, SideWork


def slow_stream(cycles: int) -> type[SideStream]:
    """A SideStream that holds every piece of work up for so many cycles, so that the current stream runs ahead of it."""

    class SlowStream(SideStream):
        def run(self, work: Callable[[], None], read: tuple[Tensor, ...] = ()) -> SideWork:
            def held_up() -> None:
                torch.cuda._sleep(cycles)
                work()

            return super().run(held_up, read)

    return SlowStream


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Raise if PyTorch makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
