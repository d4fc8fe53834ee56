"""Read scattered rows of host memory, in steps like those of decoding: what it costs that their addresses were not used lately.

    python benchmarks/studies/scattered_rows.py --rows 100 --heads 8 --layers 32 --tokens 131072

The pool is a request's, as the engine lays it out. A step reads random rows of all KV heads, layer after layer, in one CUDA
graph. *again*: the rows of the step before. *others*: other rows in each step. *others, block touched*: the same, but another
address in the same block of so many bytes was read just before, by a launch that is not counted, and by the thread block of
the same number, so most likely on the same multiprocessor. *touched elsewhere*: by another thread block. A GPU
translates addresses of host memory block by block, and remembers some translations; data of host memory it does not keep. So
the largest block whose touch saves as much as any is the unit of its translations. Before each step 256 MiB of GPU memory are
written, as weights and codes displace what the second-level cache holds of page tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvseek.benchmarks.device.memory_rates import random_row_offsets, timing_event
from kvseek.benchmarks.studies.page_fetch import FETCH_BYTES, FETCH_THREADS, KERNELS, PageFetchArguments
from kvseek.builder.compile.cuda import Specialisation
from kvseek.core.config import EXTENT_TOKENS
from kvseek.engine.cache.host_pool import HostPool
from kvseek.measurement.gpu_kernels import load_kernels
from kvseek.measurement.output import write_result

BLOCKS = (4 << 10, 64 << 10, 256 << 10, 2 << 20)  # bytes
SWEPT_BYTES = 256 << 20
AWAY = 37  # thread blocks, to be on another multiprocessor
REPEATS = 12
WARMUP = 3


@dataclass(frozen=True)
class Sizes:
    """What a step reads: of each layer heads × `rows` rows of `row_bytes`, from a pool of so many tokens."""

    rows: int
    heads: int
    layers: int
    tokens: int
    row_bytes: int


class ScatteredRows:
    """A pinned pool, and the rows that a step reads."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.kernels = load_kernels(Specialisation("bfloat16", 128, 1, "page_fetch"), device, roots=[KERNELS])
        shape = (sizes.tokens // EXTENT_TOKENS, sizes.layers, sizes.heads)
        self.pool = HostPool(*shape, sizes.row_bytes // 4, torch.bfloat16, device)
        self.pool.rows.view(torch.int16).zero_()  # pages of memory that nobody wrote to may be one and the same
        self.generator = torch.Generator(device).manual_seed(0)
        count = sizes.layers * sizes.heads * sizes.rows
        self.rows, self.touched = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
        self.out = torch.empty(count * sizes.row_bytes, dtype=torch.uint8, device=device)
        self.swept = torch.empty(SWEPT_BYTES, dtype=torch.uint8, device=device)

    def draw(self, block: int, *, elsewhere: bool = False) -> None:
        """Choose other rows, and for each of them the address half a block further on, in the same block.

        `elsewhere`: a thread block on another multiprocessor touches it.
        """
        pool, count = self.pool.rows, self.sizes.heads * self.sizes.rows
        extents, _, heads, _, _, head_dim = pool.shape
        shape = (extents, pool.stride(0), heads, head_dim, pool.itemsize, self.device)
        for layer, rows in enumerate(self.rows.view(-1, count)):
            found = random_row_offsets(count, *shape, generator=self.generator)
            rows.copy_(found + layer * pool.stride(1) * pool.itemsize)
        start = self.rows // block * block
        touched = (start + (self.rows - start + block // 2) % block).view(-1, count)
        self.touched.copy_(touched.roll(AWAY * elsewhere, dims=1).flatten())

    def fetch(self, offsets: Tensor, layer: int, row_bytes: int) -> None:
        """Read `row_bytes` at a layer's offsets on the current stream."""
        count = self.sizes.heads * self.sizes.rows
        arguments = PageFetchArguments(
            pool=self.pool.device_pointer,
            offsets=offsets.data_ptr(),
            out=self.out.data_ptr(),
            first=layer * count,
            rows=1,
            row_bytes=row_bytes,
        )
        self.kernels.launch("kvseek_page_fetch", (1, count, 1), FETCH_THREADS, arguments)

    def microseconds(
        self, *, again: bool = False, block: int | None = None, elsewhere: bool = False, rows: bool = True
    ) -> float:
        """Median of a layer's part of a step: touches of blocks, if there are to be any, and then rows, unless not wanted."""

        def run() -> None:
            for layer in range(self.sizes.layers):
                if block is not None:
                    self.fetch(self.touched, layer, FETCH_BYTES)
                if rows:
                    self.fetch(self.rows, layer, self.sizes.row_bytes)

        of_touches = block or BLOCKS[0]
        self.draw(of_touches)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = list[float]()
        for _ in range(WARMUP + REPEATS):
            if not again:
                self.draw(of_touches, elsewhere=elsewhere)
            self.swept.zero_()
            begin, end = timing_event(), timing_event()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / self.sizes.layers)
        return sorted(times[WARMUP:])[REPEATS // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or JSON with --output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100, help="of a KV head and layer, on average")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of the pool, a multiple of 1,024")
    parser.add_argument("--head_dim", type=int, default=128, help="channels of 16 bits")
    parser.add_argument("--output", type=Path, help="write JSON there")
    options = parser.parse_args(arguments)
    if options.tokens % EXTENT_TOKENS or options.tokens < EXTENT_TOKENS:
        parser.error(f"--tokens {options.tokens}: must be a positive multiple of 1,024, the tokens of an extent")
    sizes = Sizes(options.rows, options.heads, options.layers, options.tokens, 4 * options.head_dim)
    study = ScatteredRows(sizes, torch.device("cuda", torch.cuda.current_device()))
    print(
        f"{torch.cuda.get_device_name()}: microseconds a layer, {sizes.rows * sizes.heads} rows of {sizes.row_bytes} bytes"
    )
    found = {"again": study.microseconds(again=True), "others": study.microseconds()}
    for block in BLOCKS:
        touched = study.microseconds(block=block, rows=False)
        found[f"others, {block >> 10} KiB touched"] = study.microseconds(block=block) - touched
    touched = study.microseconds(block=BLOCKS[0], elsewhere=True, rows=False)
    both = study.microseconds(block=BLOCKS[0], elsewhere=True)
    found[f"others, {BLOCKS[0] >> 10} KiB touched elsewhere"] = both - touched
    for name, microseconds in found.items():
        print(f"{name:34} {microseconds:7.1f}", flush=True)
    if options.output:
        write_result(options.output, {"benchmark": "scattered_rows", "sizes": asdict(sizes), "microseconds": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
