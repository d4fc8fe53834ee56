"""Work that runs beside the current stream: copies and index encoding that no decode step should wait for.

The CPU has no streams: there the work runs at once, so the code that uses side streams is the same for both devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class SideWork:
    """A piece of work on a side stream. As long as the object lives it keeps the tensors alive that the work reads."""

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

    Tensors that the work allocates belong to the side stream. Tensors of the current stream that the work reads must be kept
    until it is done, or until the current stream has waited for it: its SideWork keeps those that `run` is given.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None], read: tuple[Tensor, ...] = ()) -> SideWork:
        """Run `work`, which reads the tensors `read`, after everything that the current stream has been given so far.

        Exceptions of `work` pass through.
        """
        if self._stream is None:
            work()
            return SideWork(self._device, None, read)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
                return SideWork(self._device, self._stream.record_event(), read)
        except BaseException:
            # There is no SideWork to wait for the half that was launched, so the current stream waits for it now.
            current.wait_stream(self._stream)
            raise


class InFlight:
    """Pieces of side work of several slots that the current stream has not waited for, oldest first; at most `most`.

    The memory that they read belongs to the current stream, so after the wait the stream may reuse it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: deque[tuple[int, SideWork]] = deque()

    def make_room(self) -> None:
        """Make the current stream wait for the oldest pieces of work, until there is room for one more."""
        self._reclaim(self._most - 1)

    def add(self, slot: int, work: SideWork) -> None:
        """Note a piece of work that has begun; call `make_room` before it begins. Work that has ended is not kept.

        On the CPU all work has: it would keep what it read, such as a layer's rows during the next layer.
        """
        if not work.done:
            self._works.append((slot, work))

    def finish(self, slot: int) -> None:
        """Make the current stream wait for the work of a slot; the host does not wait."""
        if any(owner == slot for owner, _ in self._works):
            self._reclaim(0)

    def _reclaim(self, keep: int) -> None:
        while self._works and (len(self._works) > keep or self._works[0][1].done):
            _, work = self._works.popleft()
            work.wait()


def everything_launched(device: torch.device) -> Callable[[], None]:
    """Return a function by which any thread waits for all work that the current stream has been given until now.

    On the CPU there is nothing to wait for.
    """
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def wait_for_stream(device: torch.device) -> None:
    """Wait for all work that the current stream has been given, before a copy to pageable memory, as `.cpu()` makes.

    Such a copy would wait inside the driver, where other threads' copies may wait for it in turn: those too that are to release
    a kernel which waits for another rank (engine/parallel/watch.py).
    """
    everything_launched(device)()


class BoundedLaunches:
    """Lets the host give the current stream at most `most` pieces of work before the first of them has ended.

    The driver takes about a thousand launches that have not begun. One more waits inside it, where other threads' copies may
    wait for it in turn, as `wait_for_stream` says. A wait for an event keeps nobody else waiting.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._device, self._most = device, most
        self._ends: deque[Callable[[], None]] = deque()  # each waits for the end of a piece, oldest first

    def wait(self) -> None:
        """Wait until there is room for one more piece."""
        while len(self._ends) >= self._most:
            self._ends.popleft()()

    def add(self) -> None:
        """Note that a piece has been launched; call `wait` before."""
        self._ends.append(everything_launched(self._device))


@contextmanager
def wait_on_error(device: torch.device) -> Generator[None]:
    """If the block raises, wait for the work launched on `device` before the exception goes on.

    Whoever handles the exception may hand on or free memory that this work reads, tables of the host included: functions
    that run on host cores read those.
    """
    try:
        yield
    except BaseException:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        raise


def on_default_stream(device: torch.device) -> bool:
    """Whether the device's default stream is the current one; False on the CPU, which has no streams."""
    return device.type == "cuda" and torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


def stream_handle(device: torch.device) -> int:
    """Return CUDA's handle of the current stream; 0 on the CPU, which has no streams."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def to_device(values: Sequence[int] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy integers of the host to the device, [n], on the current stream; the host does not wait."""
    on_host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # a copy from pageable memory would wait for the stream
    return on_host.to(device, non_blocking=True)


class HostCopy:
    """Copies of tensors on their way to the host. Work that the current stream is given later does not delay them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # in pinned memory, if from a GPU
        on_gpu = bool(tensors) and tensors[0].is_cuda
        self._arrival = torch.cuda.current_stream(tensors[0].device).record_event() if on_gpu else None

    def wait(self) -> list[Tensor]:
        """Wait until the copies have arrived, and return them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copies
