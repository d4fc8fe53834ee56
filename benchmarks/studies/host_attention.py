"""CTkvr on host cores: rerank and attention of one layer, beside the bandwidth of the same cores.

The step's floor is the time in which a copy by the same threads moves the bytes that the step reads. The baseline attends
to all recalled rows with the same kernel, without a rerank (CTkvr paper, figure 11).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvseek.benchmarks.timing import Samples, interleave
from kvseek.builder.compile.cpu import cached_cpu_library
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError, KvseekError
from kvseek.engine.cache.host_memory import available_bytes
from kvseek.measurement.machine import describe
from kvseek.measurement.output import show, write_result
from kvseek.plugins.ctkvr.native import (
    AUTOMATIC,
    LEVEL_NAMES,
    TYPES,
    HostPool,
    HostStep,
    host_levels,
    host_step,
    raise_error,
)

TURNS = 24  # recalled sets that take turns: what they touch exceeds last-level caches
FILL_BYTES = 64 << 20  # random numbers, repeated over the pool
WARMUP, BLOCK = 2, 4
COPIES = 5  # before the steps, and again after them
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}
GIB = 1 << 30
STEP, ALL, RERANK, NOTHING, COPY = "rerank + attention", "attention to all", "rerank alone", "nothing", "copy"


class Layer:
    """A pool of random rows, recalled places in turn, and steps over them."""

    def __init__(self, options: argparse.Namespace, pool: HostPool, library: CpuLibrary) -> None:
        self.options, self.threads, self._call = options, pool, host_step(library)
        dtype = DTYPES[options.dtype]
        heads, kv_heads, dim = options.kv_heads * options.group, options.kv_heads, options.head_dim
        extent_bytes = kv_heads * EXTENT_TOKENS * 2 * dim * dtype.itemsize
        extents = max(1, -(-options.recalled // EXTENT_TOKENS), int(options.pool_gib * GIB) // extent_bytes)
        self.rows = make_rows(extents * extent_bytes, dtype, options.huge_pages == "yes")
        self.extent_stride = extent_bytes // dtype.itemsize
        self.table = torch.randperm(extents, dtype=torch.int32)[None].contiguous()
        shape = (options.batch, kv_heads, options.recalled)
        tokens = extents * EXTENT_TOKENS
        self.recalled = [torch.empty(shape, dtype=torch.int32) for _ in range(TURNS)]
        for places in self.recalled:
            for head in places.view(-1, options.recalled):
                head.copy_(torch.randperm(tokens)[: options.recalled].sort().values)
        self.queries = torch.randn(options.batch, heads, dim).to(dtype)
        self.counts = torch.full(shape[:2], options.recalled, dtype=torch.int32)
        self.slots = torch.zeros(options.batch, dtype=torch.int32)
        self.out, self.lse = torch.empty(options.batch, heads, dim), torch.empty(options.batch, heads)
        self.best = torch.empty((*shape[:2], options.rho), dtype=torch.int32)
        self.best_count = torch.empty(shape[:2], dtype=torch.int32)
        self.selected = torch.empty((*shape[:2], options.selected), dtype=torch.int32)
        self.error = ctypes.c_int32(0)

    def caller(self, top_k: int, attends: bool, reranks: bool, counts: Tensor | None = None) -> Callable[[], None]:
        """A function that runs one step, on the next recalled places each time."""
        steps = itertools.cycle(
            [
                self._step(places, top_k, attends, reranks, counts if counts is not None else self.counts)
                for places in self.recalled
            ]
        )

        def call() -> None:
            self._call(ctypes.byref(next(steps)))
            raise_error(self.error.value)

        return call

    def _step(self, places: Tensor, top_k: int, attends: bool, reranks: bool, counts: Tensor) -> HostStep:
        options = self.options
        wanted: dict[str, Tensor] = {"out": self.out, "lse": self.lse} if attends else {"selected": self.selected}
        if reranks:
            wanted |= {"best": self.best, "best_count": self.best_count}
        return HostStep(
            pool=self.threads.pointer,
            queries=self.queries.data_ptr(),
            recalled=places.data_ptr(),
            recalled_count=counts.data_ptr(),
            slots=self.slots.data_ptr(),
            table=self.table.data_ptr(),
            rows=self.rows.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in wanted.items()},
            error=ctypes.addressof(self.error),
            extent_stride=self.extent_stride,
            batch=options.batch,
            heads=options.kv_heads * options.group,
            kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            capacity=options.recalled,
            top_k=top_k,
            rho=options.rho,
            table_slots=1,
            max_extents=self.table.shape[1],
            dtype=TYPES[DTYPES[options.dtype]],
            level=options.level,
            scaling=options.head_dim**-0.5,
        )


def make_rows(size: int, dtype: torch.dtype, huge_pages: bool) -> Tensor:
    """Random rows of `size` bytes in fresh memory."""
    if size + FILL_BYTES > available_bytes():
        raise KernelError(f"pool_gib: {size / GIB:.1f} GiB: must fit {available_bytes() / GIB:.1f} GiB; lower it")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    rows = torch.frombuffer(memory, dtype=dtype)
    numbers = torch.randn(FILL_BYTES // dtype.itemsize).to(dtype)
    for part in torch.split(rows, numbers.numel()):
        part.copy_(numbers[: part.numel()])
    return rows


def copier(rows: Tensor) -> tuple[Callable[[], None], int]:
    """A function that copies a quarter of a pool's memory, and the bytes that it reads and writes."""
    source = rows[: rows.numel() // 4]
    target = torch.zeros_like(source)
    return lambda: void(target.copy_(source)), 2 * source.nbytes


def void(_: object) -> None:
    """Drop a result."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time all contestants; see the module."""
    library = CpuLibrary(cached_cpu_library())
    best, automatic = host_levels(library)
    torch.set_num_threads(options.threads)
    with HostPool(library, options.threads, "all" if options.pin == "yes" else "none") as pool:
        layer = Layer(options, pool, library)
        copy, copied = copier(layer.rows)
        samples = interleave({COPY: copy}, COPIES, 1, 1)
        samples |= in_thread_of_its_own(lambda: time_steps(layer, options))
        samples[COPY].seconds += interleave({COPY: copy}, COPIES, 1, 1)[COPY].seconds
    rate = copied / samples[COPY].median
    half = options.batch * options.kv_heads * options.head_dim * DTYPES[options.dtype].itemsize  # of a row, all heads
    read = {STEP: (options.recalled + options.selected) * half, ALL: 2 * options.recalled * half}
    read[RERANK] = options.recalled * half
    return {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "machine": describe(),
        "level": LEVEL_NAMES[automatic if options.level == AUTOMATIC else options.level],
        "best_level": LEVEL_NAMES[best],
        "copy_bytes_per_second": rate,
        "pool_bytes": layer.rows.nbytes,
        "seconds": {name: values.summary() for name, values in samples.items()},
        "bytes_read": read,
        "times_floor": {name: samples[name].median * rate / size for name, size in read.items()},
        "attention_to_all_over_step": samples[ALL].median / samples[STEP].median,
    }


def time_steps(layer: Layer, options: argparse.Namespace) -> dict[str, Samples]:
    """Time steps in turns."""
    nothing = torch.zeros_like(layer.counts)
    nothing[0, 0] = 1
    contestants = {
        STEP: layer.caller(options.selected, attends=True, reranks=True),
        ALL: layer.caller(options.recalled, attends=True, reranks=False),
        RERANK: layer.caller(options.selected, attends=False, reranks=False),
        NOTHING: layer.caller(options.selected, attends=True, reranks=False, counts=nothing),
    }
    return interleave(contestants, options.repeats, BLOCK, WARMUP)


def in_thread_of_its_own(call: Callable[[], dict[str, Samples]]) -> dict[str, Samples]:
    """Run a function in a thread, which the pool binds to a core for good: as CUDA's, and not the one that copies."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()


def print_table(result: dict[str, Any]) -> None:
    """Print a result for people."""
    options, machine = result["options"], result["machine"]
    console = Console()
    console.print(
        f"{machine['cpu']}, {options['threads']} threads, {result['level']} (best here: {result['best_level']})"
    )
    table = Table("", "median µs", "min", "max", "MB read", "GB/s", "× floor")
    for name, values in result["seconds"].items():
        size, times = result["bytes_read"].get(name), result["times_floor"].get(name)
        figures = [f"{values[key] * 1e6:,.0f}" for key in ("median", "min", "max")]
        if name == COPY:
            rates = ["", f"{result['copy_bytes_per_second'] / 1e9:.1f}", ""]
        else:
            rates = (
                [f"{size / 1e6:.1f}", f"{size / values['median'] / 1e9:.1f}", f"{times:.2f}"] if size else ["", "", ""]
            )
        table.add_row(name, *figures, *rates)
    console.print(table)
    console.print(
        f"floor: the bytes read, at the copy's rate (read and written bytes). "
        f"Attention to all recalled rows takes {result['attention_to_all_over_step']:.2f} × the step."
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m kvseek.benchmarks.studies.host_attention", description=__doc__)
    parser.add_argument("--threads", type=int, default=cores, help="of the step and of the copy (default: all cores)")
    parser.add_argument("--pin", choices=("yes", "no"), default="yes", help="bind threads to cores")
    levels = ", ".join(f"{level} {name}" for level, name in LEVEL_NAMES.items())
    parser.add_argument("--level", type=int, default=AUTOMATIC, help=f"instructions: -1 automatic, {levels}")
    parser.add_argument("--repeats", type=int, default=40, help="timed calls of each contestant")
    parser.add_argument("--pool_gib", type=float, default=2.0, help="memory of the row pool")
    parser.add_argument("--huge_pages", choices=("yes", "no"), default="no", help="of the row pool")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--recalled", type=int, default=10240, help="keys to rerank per KV head")
    parser.add_argument("--selected", type=int, default=1024, help="rows to attend to per KV head")
    parser.add_argument("--rho", type=int, default=2560, help="places of the list for the centroid update")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--output", type=Path, help="write JSON to this file")
    options = parser.parse_args(arguments)
    for name in ("threads", "repeats", "pool_gib", "batch", "kv_heads", "group", "recalled", "selected", "rho"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} {getattr(options, name)}: must be positive")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    options = parse(arguments)
    torch.manual_seed(0)
    try:
        result = measure(options)
    except KvseekError as error:
        print(error, file=sys.stderr)
        return 1
    show(result, options.json, print_table)
    if options.output:
        write_result(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
