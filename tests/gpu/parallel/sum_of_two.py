"""One of two ranks that sum tensors in symmetric memory; test_sums.py starts both.

    python -m tests.gpu.parallel.sum_of_two RANK PORT

The last sum is rank 0's alone: rank 1 ends without it, and rank 0 has to free its kernel.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from kvseek.engine.parallel.gpus import take_gpu
from kvseek.engine.parallel.ranks import Ranks, find_store
from kvseek.engine.parallel.sums import BUFFER_BYTES, SMALL_BYTES, SymmetricSums, measure
from kvseek.engine.parallel.watch import RELEASE_SECONDS

SECONDS = 60.0
WAIT_CYCLES = 50_000_000  # some 30 ms: one rank comes late


def check(sums: SymmetricSums, rank: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Sums of whole numbers are rounded once; eagerly, with a rank that comes late, and in a graph that is replayed."""
    numbers = torch.arange(shape[0] * shape[1], device=device).remainder(101).view(shape).to(dtype)
    own, expected = numbers * (rank + 1), numbers * 3
    for late in (None, 0, 1):
        if late == rank:
            torch.cuda._sleep(WAIT_CYCLES)
        found = sums.sum(own.clone())
        assert found.is_contiguous()
        assert torch.equal(found, expected), (shape, dtype, late)
    static, stream = own.clone(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        once = sums.sum(static * 1)
        twice = sums.sum(once * 1)  # the next sum follows at once, in the same buffer
    for factor in (1, 2, 0):
        static.copy_(own * factor)
        graph.replay()
        assert torch.equal(once, expected * factor), (shape, dtype, factor)
        assert torch.equal(twice, expected * factor * 2), (shape, dtype, factor)


def main(rank: int, port: int) -> None:
    Ranks.join(find_store("127.0.0.1", port, SECONDS), rank, 2, SECONDS)
    device = take_gpu(rank, 2)
    assert dist.group.WORLD is not None
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            sums = SymmetricSums(dist.group.WORLD, device, dtype)
            large, in_pieces = (size // dtype.itemsize // 128 + 3 for size in (SMALL_BYTES, BUFFER_BYTES))
            for shape in ((1, 128), (3, 401), (64, 4096), (large, 128), (large, 129), (in_pieces, 128)):
                check(sums, rank, shape, dtype, device)
            seconds = measure(sums, 4, 4096, dtype, device)
            print(f"rank {rank}: {dtype}, a sum of [4, 4096]: {seconds * 1e6:.1f} us", flush=True)
        torch.cuda.synchronize(device)
        dist.barrier()
        if rank == 1:
            os._exit(0)
        for _ in range(100):
            tensor = sums.sum(torch.ones(4, 4096, dtype=dtype, device=device))
        begun, end = time.monotonic(), torch.cuda.current_stream(device).record_event()
        assert not end.query(), "nobody else sums"
        while not end.query():
            assert time.monotonic() - begun < SECONDS, "kernels are not freed"
            sums.release()
            time.sleep(RELEASE_SECONDS)
        torch.cuda.synchronize(device)
        print(f"rank 0: 100 sums were freed in {time.monotonic() - begun:.2f} s; {tensor.shape}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
