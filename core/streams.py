"""Work that runs beside the current stream: copies and index encoding that no decode step should wait for.

On the CPU there are no streams: the work runs at once, so the code that uses this is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch


class Ticket:
    """The end of a piece of side work."""

    def __init__(self, device: torch.device, event: torch.cuda.Event | None) -> None:
        self._device, self._event = device, event

    @property
    def done(self) -> bool:
        """Whether the work has ended; never waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Make the current stream wait for the work; the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class SideStream:
    """A stream of its own on a CUDA device. Pieces of work run one after the other, in the order given.

    Tensors that the work allocates belong to the side stream. Tensors of the current stream that it reads must be kept
    until its ticket is done, or until the current stream has waited for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> Ticket:
        """Run `work` after all that the current stream has been given so far; what `work` raises passes through."""
        if self._stream is None:
            work()
            return Ticket(self._device, None)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
                return Ticket(self._device, self._stream.record_event())
        except BaseException:
            # No ticket: nobody could wait for the half that was launched, so what follows here does.
            current.wait_stream(self._stream)
            raise


@contextmanager
def wait_on_error(device: torch.device) -> Generator[None]:
    """If the block raises, wait for what was launched on `device` before the exception goes on.

    Who handles it may hand on or free what that work reads; functions on host cores read tables of the host's as well.
    """
    try:
        yield
    except BaseException:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        raise


def on_default_stream(device: torch.device) -> bool:
    """Whether the device's default stream is the current one; the CPU has none."""
    return device.type == "cuda" and torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def stream_handle(device: torch.device) -> int:
    """CUDA's handle of the current stream; 0 on the CPU, which has none."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
