"""Two ways to sum tensors of all ranks on GPUs inside a captured decode step, and the measured choice between them.

PyTorch's symmetric memory lets kernels of each GPU read and write a buffer of every other one: one kernel waits for the
others' parts, and adds them up (`one_shot_all_reduce`, as fast as a few microseconds) or does so for its share and writes the
sums to all (`two_shot_all_reduce_`). NCCL is there for machines on which that does not work, and for large tensors.

What a decode step adds to the residual stream needs no kernel of its own to be summed up: with symmetric memory there are inboxes
too, by which the kernels that add and normalise hand each other their parts (ranks.py).
"""

from __future__ import annotations

import itertools
import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kvseek.core.batch import buckets_for
from kvseek.core.config import EngineConfig
from kvseek.core.errors import KvseekError

SYMMETRIC, NCCL = "symmetric memory", "NCCL"
BUFFER_BYTES = 16 << 20  # of a rank's symmetric memory; larger tensors are summed in pieces
NCCL_BYTES = 512 << 20  # of a GPU's memory that NCCL is expected to take; an estimate
# Tensors up to this size are those of decode steps, but for the logits of large batches: each rank reads all of every other
# one's part.
SMALL_BYTES = 1 << 20
ALIGNMENT = 16  # bytes: what the kernels of symmetric memory read at once
SYMMETRIC_DTYPES = (torch.bfloat16, torch.float32)  # that its sums are compiled for
MEASURED_SUMS = 50  # in the graph that is timed, about those of a step
MEASURED_REPLAYS = 9
WATCHED_SECONDS = 3600.0  # until PyTorch tells of a sum that waits: long, as watch.py notices earlier
logger = logging.getLogger(__name__)


class SumError(KvseekError):
    """Ranks cannot sum tensors on their GPUs."""


@dataclass(frozen=True)
class Inboxes:
    """What kernels of a rank need to hand each other rows of the residual stream's size (kvseek_sum_add_rms_norm of layer.cu).

    Attributes
    ----------
    rank : int
    own : Tensor, uint8
        This rank's inbox, of `inbox_bytes` bytes; zeros at first.
    addresses : Tensor, int64 [ranks], on the GPU
        Of the inboxes of all ranks.
    counts : Tensor, int32 [rows], on the GPU
        Sums of each row so far; zeros at first.
    stop : Tensor, int32 [1], on the GPU
        Kernels do not wait for other ranks if it is not 0.
    """

    rank: int
    own: Tensor
    addresses: Tensor
    counts: Tensor
    stop: Tensor

    @classmethod
    def over(cls, rank: int, own: Tensor, addresses: Sequence[int], rows: int) -> Inboxes:
        """Make those of a rank, whose own inbox has been cleared, for `rows` rows."""

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=own.device)

        return cls(rank, own, torch.tensor(addresses, device=own.device), zeros(rows), zeros(1))


def inbox_rows(max_batch_size: int, hidden: int, dtype: torch.dtype) -> int:
    """Return how many rows inboxes are for: those of the largest decode step, or of SMALL_BYTES."""
    return min(buckets_for(max_batch_size)[-1], SMALL_BYTES // (hidden * dtype.itemsize))


def inbox_bytes(ranks: int, rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Return the bytes of an inbox: two sums of all ranks' parts, and a number beside each 4 bytes of them."""
    return 2 * ranks * rows * hidden * dtype.itemsize * 2


def symmetric_bytes(ranks: int) -> int:
    """Return the most bytes of symmetric memory that a rank takes."""
    return BUFFER_BYTES + 4 * ranks * SMALL_BYTES


class Sums(Protocol):
    """A way to sum. Calls are made by all ranks in the same order, each on the current stream of its GPU."""

    @property
    def name(self) -> str:
        """How `--inspect` and the log call it."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, contiguous and of the same shape; captured in a graph if one is being captured.

        The result is the same on all ranks, bit for bit. `tensor` may be overwritten.
        """

    def release(self) -> None:
        """Let kernels that wait for a rank which will never come end, with wrong sums. Any thread may call this, repeatedly."""

    def close(self) -> None:
        """Free what this process holds; no sum is under way."""


class SymmetricSums:
    """Sums in PyTorch's symmetric memory (torch.distributed._symmetric_memory).

    Parameters
    ----------
    group : ProcessGroup
        Of all ranks, of any backend: its store tells the ranks each other's memory.
    rows, hidden : int
        Size of the residual stream of the largest decode step that `inboxes` are for.

    Attributes
    ----------
    inboxes : Inboxes
        Other ranks may write to this rank's when all have made theirs.

    Raises
    ------
    SumError
        If the dtype has no sums there.
    RuntimeError
        If the GPUs cannot reach each other's memory.
    """

    name = SYMMETRIC
    exchanges: ClassVar[int] = 0  # of handles to memory, in this process so far

    @classmethod
    def catch_up(cls, exchanges: int, rank: int, device: torch.device) -> None:
        """Exchange handles with nobody until this process has done so `exchanges` times.

        PyTorch numbers the exchanges of a process and finds those of other ranks by the number (StoreExchange of
        CUDASymmetricMemoryUtils.hpp). Rank 0 may be in a process that has had an engine of several ranks before, and the other
        ranks are in new ones.
        """
        if cls.exchanges < exchanges:
            alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
            while cls.exchanges < exchanges:
                cls._exchange(torch.uint8, ALIGNMENT, alone, device)

    @classmethod
    def _exchange(
        cls, dtype: torch.dtype, size: int, group: dist.ProcessGroup, device: torch.device
    ) -> tuple[Tensor, Any]:
        """Allocate symmetric memory; returns it and what gives access to that of the other ranks of a group."""
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(size, dtype=dtype, device=device)
        cls.exchanges += 1
        return buffer, symmetric.rendezvous(buffer, group)

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, rows: int, hidden: int
    ) -> None:
        if dtype not in SYMMETRIC_DTYPES:
            raise SumError(f"dtype = {dtype}: must be one of {SYMMETRIC_DTYPES} for sums in symmetric memory")
        self._group = group.group_name
        self._buffer, self._memory = self._exchange(dtype, BUFFER_BYTES // dtype.itemsize, group, device)
        self._unit = ALIGNMENT // dtype.itemsize
        rank, size = group.rank(), group.size()
        self._own = self._memory.get_signal_pad(rank)
        self._others = [self._memory.get_signal_pad(other) for other in range(size) if other != rank]
        # Copied by `release`: copy engines work while kernels wait, and no kernel has to be loaded for that.
        signals = [*release_signals(self._own.numel(), rank, size), torch.zeros(self._own.numel(), dtype=torch.int32)]
        *own, self._zeros = (one.pin_memory().view(self._own.dtype).view(self._own.shape) for one in signals)
        self._signals = itertools.cycle(own)
        inbox, memory = self._exchange(torch.uint8, inbox_bytes(size, rows, hidden, dtype), group, device)
        addresses = [memory.get_buffer(other, (inbox.numel(),), torch.uint8).data_ptr() for other in range(size)]
        self.inboxes = Inboxes.over(rank, inbox.zero_(), addresses, rows)
        self._stopped = torch.ones(1, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize(device)
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def sum(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1)
        out = torch.empty_like(flat)
        for start in range(0, flat.numel(), self._buffer.numel()):
            piece = slice(start, min(start + self._buffer.numel(), flat.numel()))
            self._sum_piece(flat[piece], out[piece])
        return out.view(tensor.shape)

    def _sum_piece(self, part: Tensor, out: Tensor) -> None:
        """Sum a piece that the buffer holds."""
        # What lies behind the piece in the buffer is added up as well, if the piece has no whole number of units.
        whole = self._buffer[: -(-part.numel() // self._unit) * self._unit]
        own = self._buffer[: part.numel()]
        operations = torch.ops.symm_mem
        if whole.nbytes > SMALL_BYTES:
            own.copy_(part)
            operations.two_shot_all_reduce_(whole, "sum", self._group)
            out.copy_(own)
        elif own.numel() == whole.numel() and part.storage_offset() % self._unit == 0:
            operations.one_shot_all_reduce_copy_out(own, part, "sum", self._group, out)
        else:
            own.copy_(part)
            out.copy_(operations.one_shot_all_reduce(whole, "sum", self._group)[: out.numel()])

    def release(self) -> None:
        """See Sums. A sum waits several times, so many calls are needed for a step."""
        with torch.cuda.stream(self._beside):
            self.inboxes.stop.copy_(self._stopped, non_blocking=True)
            self._own.copy_(next(self._signals), non_blocking=True)
            for pad in self._others:
                pad.copy_(self._zeros, non_blocking=True)

    def close(self) -> None:
        """See Sums. The buffer is freed with this object."""


class NcclSums:
    """Sums by NCCL, in a communicator of its own; raises RuntimeError where NCCL cannot connect the GPUs."""

    name = NCCL

    def __init__(self, device: torch.device) -> None:
        timeout = timedelta(seconds=WATCHED_SECONDS)
        self._group = dist.new_group(backend="nccl", timeout=timeout, device_id=device)
        self._device = device
        self._aborting, self._lock = (
            threading.Thread(target=self._abort, name="kvseek-nccl", daemon=True),
            threading.Lock(),
        )
        self.sum(torch.zeros(ALIGNMENT, device=device))  # connects: that cannot be captured
        torch.cuda.synchronize(device)

    def sum(self, tensor: Tensor) -> Tensor:
        whole = tensor.contiguous()
        dist.all_reduce(whole, group=self._group)
        return whole

    def release(self) -> None:
        """See Sums. The communicator is of no use afterwards.

        NCCL frees kernels at once, but its call returns only when all graphs that use the communicator are gone. A thread of its
        own waits for that, as whoever calls this has other kernels to free: a graph may have sums of both ways.
        """
        with self._lock:
            if self._aborting.ident is None:
                self._aborting.start()

    def close(self) -> None:
        """See Sums. It returns when all graphs that use the communicator are gone."""
        self.release()
        self._aborting.join()

    def _abort(self) -> None:
        try:
            self._group._get_backend(self._device).abort()
        except RuntimeError:  # of NCCL or CUDA, after a fault of which nothing can be freed
            logger.exception("NCCL's communicator cannot be aborted")


def release_signals(count: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Make two states of a rank's own signals, int32 [count], that free its kernels if they are written in turn.

    With symmetric memory each block of a kernel has a signal for each rank, of all ranks in turn. For each rank, its own too, a
    thread waits until its rank's signal there is 0, makes it 1, and waits until that rank's signal here is 1, and makes it 0
    (sync_remote_blocks of PyTorch's CUDASymmetricMemory-inl.h). Signals there are to be 0, and here 1; but the rank's own
    is both, so it has to change.
    """
    ones = torch.ones(count, dtype=torch.int32)
    itself = torch.arange(count) % size == rank
    return ones.masked_fill(itself, 0), ones


def expected_sums(config: EngineConfig) -> str:
    """Say how the ranks of an engine sum, as far as that is known without its GPUs."""
    if config.tp_size == 1:
        return "none"
    if config.device == "cpu":
        return "gloo"
    return f"{SYMMETRIC} or {NCCL}, whichever is faster when the engine is loaded, as the log then says"


def measure(sums: Sums, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> float:
    """Measure the seconds of one sum of [rows, hidden] in a captured graph: the median of several replays."""
    tensor = torch.zeros(rows, hidden, dtype=dtype, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        sums.sum(tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(MEASURED_SUMS):
            tensor = sums.sum(tensor)
    times = list[float]()
    for _ in range(MEASURED_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / MEASURED_SUMS)
    return statistics.median(times)


def choose(seconds: Mapping[str, float]) -> str:
    """Choose the way that takes least, given the slowest rank's seconds of each that works; raises SumError if none does."""
    if not seconds:
        raise SumError(
            "the ranks' GPUs can sum neither in symmetric memory nor by NCCL (the log of each rank says why); "
            "build with --tp_size 1"
        )
    return min(seconds, key=lambda name: seconds[name])


def try_to_make(make: Callable[[], Sums]) -> tuple[Sums | None, str]:
    """Make a way to sum; if that fails, return None and why."""
    # What PyTorch raises where it has no such way, and what these classes raise.
    expected = (RuntimeError, SumError, ImportError, AttributeError)
    try:
        return make(), ""
    except expected as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
