"""Work that runs beside the current stream: copies and index encoding that no decode step should wait for.

On the CPU there are no streams: the work runs at once, so the code that uses this is the same for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor


class Ticket:
    """The end of a piece of side work. It keeps the tensors that the work reads for as long as it is kept itself."""

    def __init__(self, device: torch.device, event: torch.cuda.Event | None, read: tuple[Tensor, ...] = ()) -> None:
        self._device, self._event, self._read = device, event, read

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
    until its ticket is done, or until the current stream has waited for it: the ticket keeps those that it is given.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None], read: tuple[Tensor, ...] = ()) -> Ticket:
        """Run `work`, which reads `read`, after all that the current stream has been given so far.

        What `work` raises passes through.
        """
        if self._stream is None:
            work()
            return Ticket(self._device, None, read)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
                return Ticket(self._device, self._stream.record_event(), read)
        except BaseException:
            # No ticket: nobody could wait for the half that was launched, so what follows here does.
            current.wait_stream(self._stream)
            raise


class InFlight:
    """Side works of several slots that have not been waited for, oldest first.

    What they read belongs to the current stream, so after its wait that memory may go to whatever it runs next.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: deque[tuple[int, Ticket]] = deque()

    def make_room(self) -> None:
        """Make the current stream wait until one work less than the most is left."""
        self._reclaim(self._most - 1)

    def add(self, slot: int, ticket: Ticket) -> None:
        """Note a work, unless it has ended as every one has on the CPU; `make_room` came before it was begun."""
        if not ticket.done:  # else its ticket would keep what it read, on the CPU a layer's rows during the next layer
            self._works.append((slot, ticket))

    def finish(self, slot: int) -> None:
        """Make the current stream wait for the works of a slot; the host does not wait."""
        if any(owner == slot for owner, _ in self._works):
            self._reclaim(0)

    def _reclaim(self, keep: int) -> None:
        while self._works and (len(self._works) > keep or self._works[0][1].done):
            _, ticket = self._works.popleft()
            ticket.wait()


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
