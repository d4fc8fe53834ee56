"""The choice between ways to sum, which GPU each rank takes, and the thread that notices that a rank has ended."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvseek.core.errors import ConfigError
from kvseek.engine.parallel.channel import Channel
from kvseek.engine.parallel.cuda import sums as sums_module
from kvseek.engine.parallel.cuda.gpus import gpu_of_rank
from kvseek.engine.parallel.cuda.sums import (
    NCCL,
    SYMMETRIC,
    NcclSums,
    SumError,
    SymmetricSums,
    choose,
    release_signals,
    try_to_make,
)
from kvseek.engine.parallel.ranks import create_store, find_store
from kvseek.engine.parallel.reports import Reporter, Reports
from kvseek.engine.parallel.watch import Watch, has_failed


def test_the_faster_way_is_chosen() -> None:
    assert choose({SYMMETRIC: 7e-6, NCCL: 21e-6}) == SYMMETRIC
    assert choose({SYMMETRIC: 30e-6, NCCL: 21e-6}) == NCCL
    assert choose({NCCL: 21e-6}) == NCCL
    with pytest.raises(SumError, match="the ranks' GPUs can sum neither in symmetric memory nor by NCCL"):
        choose({})


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_signals_free_a_kernel_whose_neighbours_are_dead(rank: int) -> None:
    """Threads of a block as PyTorch's kernels have them, which wait eight times for three ranks; only this one lives."""
    size, blocks, passed = 3, 2, 0
    pads = [[one % 2] * (size * blocks) for one in range(size)]  # whatever the others left
    here = pads[rank]

    def thread(block: int, target: int) -> Iterator[None]:
        for _ in range(8):
            for pad, number, wanted in ((pads[target], rank, 0), (here, target, 1)):
                while pad[block * size + number] != wanted:
                    yield
                pad[block * size + number] = 1 - wanted

    waiting = [thread(block, target) for block in range(blocks) for target in range(size)]
    turns = itertools.cycle(signals.tolist() for signals in release_signals(size * blocks, rank, size))
    for _ in range(200):
        here[:] = next(turns)
        for other, pad in enumerate(pads):
            if other != rank:
                pad[:] = [0] * len(pad)
        waiting = [one for one in waiting if next(one, "ended") != "ended"]
        passed = size * blocks - len(waiting)
    assert passed == size * blocks


def test_a_way_that_is_not_there_says_why() -> None:
    def broken() -> SymmetricSums:
        raise RuntimeError("CUDASymmetricMemory is not there\nwith a second line")

    assert try_to_make(broken) == (None, "RuntimeError: CUDASymmetricMemory is not there")
    half = torch.float16

    def refused() -> SymmetricSums:
        group: torch.distributed.ProcessGroup = None  # type: ignore[assignment]
        return SymmetricSums(group, torch.device("cuda"), half, 1, 8)

    _, reason = try_to_make(refused)
    assert "dtype = torch.float16: must be one of" in reason


def test_kernels_are_freed_while_nccl_waits_for_graphs() -> None:
    """A graph may have sums of both ways: those in symmetric memory must be freed before NCCL's abort has returned."""
    gone, begun = threading.Event(), threading.Semaphore(0)

    class Backend:
        def abort(self) -> None:
            begun.release()
            gone.wait()

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_module.dist, "new_group", lambda **_: Group())
        patch.setattr(sums_module.torch.cuda, "synchronize", lambda _: None)
        patch.setattr(sums_module.dist, "all_reduce", lambda tensor, group: None)
        sums = NcclSums(torch.device("cpu"))
    for _ in range(3):
        sums.release()  # returns although no graph is gone
    assert begun.acquire(timeout=60)
    closing = threading.Thread(target=sums.close, daemon=True)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "the group must not end before"
    gone.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not begun.acquire(blocking=False), "it is aborted once"


def test_each_rank_takes_a_gpu_of_its_own() -> None:
    assert [gpu_of_rank(rank, 4, 8, share=False) for rank in range(4)] == [0, 1, 2, 3]
    assert [gpu_of_rank(rank, 4, 4, share=True) for rank in range(4)] == [0, 1, 2, 3]
    assert [gpu_of_rank(rank, 4, 2, share=True) for rank in range(4)] == [0, 1, 0, 1]
    for count, share in ((1, False), (0, True)):
        message = f"tp_size = 2: must be <= {count}, the GPUs that PyTorch sees on this host"
        with pytest.raises(ConfigError, match=message):
            gpu_of_rank(0, 2, count, share)


@pytest.fixture
def pair() -> tuple[Channel, Channel]:
    """Both ends of a rank's connection; rank 0's is the first."""
    own, theirs = Pipe()
    return Channel(own), Channel(theirs)


@pytest.fixture
def store() -> TCPStore:
    """A store that lives as long as the test."""
    return create_store(60.0)


@pytest.fixture
def reports(store: TCPStore) -> Reports:
    """Of rank 1, which reports nothing."""
    return Reports(find_store(store.host, store.port, 60.0), Reporter(), [1])


def test_a_connection_tells_whether_its_rank_has_failed(pair: tuple[Channel, Channel]) -> None:
    own, theirs = pair
    assert not has_failed(own)
    theirs.send(b"")  # READY
    assert not has_failed(own)
    assert own.receive() == b""
    theirs.send(b"an error")
    assert has_failed(own)
    assert own.receive() == b"an error", "nothing was read"
    theirs.close()
    assert has_failed(own)
    own.close()
    assert has_failed(own)


def test_kernels_are_released_when_a_rank_ends(pair: tuple[Channel, Channel], reports: Reports) -> None:
    own, theirs = pair
    released = threading.Semaphore(0)
    watch = Watch({1: own}, released.release, 600.0, reports)
    watch.begin()
    assert not watch.failure
    theirs.close()
    for _ in range(3):  # again and again: each lets kernels pass one wait
        assert released.acquire(timeout=60)
    assert watch.failure == "rank 1: it has ended or failed"
    watch.end()
    watch.close()
    watch.close()


def test_kernels_are_released_when_the_engine_is_closed(pair: tuple[Channel, Channel], reports: Reports) -> None:
    released = threading.Event()
    watch = Watch({1: pair[0]}, released.set, 600.0, reports)
    watch.free()
    assert released.wait(60)
    assert not watch.failure
    watch.close()


def test_pipes_of_ranks_are_sockets() -> None:
    """has_failed looks into them without reading."""
    own, _ = Pipe()
    with socket.socket(fileno=own.fileno()) as peer:
        assert peer.family == socket.AF_UNIX
        peer.detach()
