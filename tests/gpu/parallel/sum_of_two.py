"""One of two ranks that sum tensors in symmetric memory; test_sums.py starts both.

    python -m tests.gpu.parallel.sum_of_two RANK PORT

The last sum is rank 0's alone: rank 1 ends without it, and rank 0 has to free its kernel.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from kvseek.bench.methods import method_kernels
from kvseek.core.model_config import ModelConfig
from kvseek.engine.parallel.cuda.gpus import take_gpu
from kvseek.engine.parallel.cuda.ranks import RankLayerKernels
from kvseek.engine.parallel.cuda.sums import BUFFER_BYTES, SMALL_BYTES, SymmetricSums, inbox_rows, measure
from kvseek.engine.parallel.ranks import Ranks, find_store
from kvseek.engine.parallel.reports import Reporter
from kvseek.engine.parallel.watch import RELEASE_SECONDS
from kvseek.plugins.registry import get_method

SECONDS, HIDDEN = 60.0, 4096
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


def check_norms(sums: SymmetricSums, rank: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sums on the way to a norm: in eager turns in which a rank comes late, and in a graph that is replayed; and their time."""
    ranks: Any = SimpleNamespace(inboxes=sums.inboxes, reporter=Reporter())
    compiled = method_kernels("full", get_method("full").configure({}), str(dtype).removeprefix("torch."), 64, 3)
    model = ModelConfig("llama", 1000, HIDDEN, 64, 1, 12, 4, 64, 1e-6, 1e6, 1 << 12)
    ops = RankLayerKernels(compiled, model, dtype, device, 64, ranks)
    x, weight = torch.zeros(rows, HIDDEN, device=device, dtype=dtype), torch.ones(HIDDEN, device=device, dtype=dtype)
    part = torch.full_like(x, rank + 1)
    for late in (None, 0, 1):
        if late == rank:
            torch.cuda._sleep(WAIT_CYCLES)
        ops.add_rms_norm(x, part, weight)
    assert x.eq(9).all()
    row, stream = x[:1], torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(50):
            ops.add_rms_norm(row, part[:1], weight)
    times = list[float]()
    for _ in range(9):
        row.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 50)
        assert row.eq(150).all()
    print(f"rank {rank}: {dtype}, a sum with its norm of [1, {HIDDEN}]: {sorted(times)[4] * 1e3:.1f} us", flush=True)


def main(rank: int, port: int) -> None:
    Ranks.join(find_store("127.0.0.1", port, SECONDS), rank, 2, SECONDS)
    device = take_gpu(rank, 2)
    assert dist.group.WORLD is not None
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            rows = inbox_rows(64, HIDDEN, dtype)
            sums = SymmetricSums(dist.group.WORLD, device, dtype, rows, HIDDEN)
            dist.barrier()  # until the other rank has cleared its inbox
            check_norms(sums, rank, rows, dtype, device)
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
