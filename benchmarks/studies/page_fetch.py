"""Fetch pages from host memory: contiguous pages or not, one launch or many (PRKV paper, section 4.2 and fig. 7).

    python benchmarks/studies/page_fetch.py --pages 24 --heads 8 --tokens 131072

Times what a layer's step fetches. Contiguous: the pool of a KV head holds its rows one after another, so a page is one run
of bytes, as kvseek's pool has it ("HND"). Not contiguous: a token's rows of all KV heads are neighbours ("NHD"), so a
page of a head is as many runs as it has rows. Batched: one launch for all pages of all heads. Not batched: a launch for
each KV head, or for each page. Launches are recorded in a CUDA graph, and once more are made one by one, which adds the
host's time for each. The served path is the contiguous and batched one.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvseek.builder.compile.cuda import Specialisation
from kvseek.engine.cache.host_pool import HostPool
from kvseek.measurement.gpu_kernels import load_kernels
from kvseek.measurement.output import write_result

KERNELS = Path(__file__).parents[1] / "cuda"
FETCH_THREADS, FETCH_BYTES = 256, 16  # as in page_fetch.cu
REPEATS = 30
FETCHES = 8  # of one timing, each of other pages: caches hold none


class PageFetchArguments(ctypes.Structure):
    """Arguments of kvseek_page_fetch, as in page_fetch.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pool", "offsets", "out")),
        ("row_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("first", "rows", "row_bytes", "unused")),
    )


@dataclass(frozen=True)
class Sizes:
    """What a layer's step fetches, and from how large a pool."""

    pages: int
    heads: int
    tokens: int
    page_rows: int
    row_bytes: int

    @property
    def bytes_fetched(self) -> int:
        """Of one fetch."""
        return self.pages * self.heads * self.page_rows * self.row_bytes


@dataclass(frozen=True)
class Result:
    """One variant; microseconds of one fetch."""

    contiguous: bool
    launches: int
    in_graph_us: float
    one_by_one_us: float
    gigabytes_per_second: float


class PageFetch:
    """Fetches random pages of a pinned pool in one of the variants."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        unit = Specialisation("bfloat16", 128, 1, "page_fetch")
        self.sizes, self.kernels = sizes, load_kernels(unit, device, roots=[KERNELS])
        # One layer whose extents hold the rows of all heads; how they are numbered is up to the variant.
        self.pool = HostPool(sizes.tokens // 1024, 1, sizes.heads, sizes.row_bytes // 4, torch.bfloat16, device)
        self.pool.rows.view(torch.int16).zero_()  # pages of memory that nobody wrote to may be one and the same
        count = FETCHES * sizes.heads * sizes.pages
        self.out = torch.empty(count * sizes.page_rows * sizes.row_bytes, dtype=torch.uint8, device=device)
        head = torch.arange(sizes.heads, device=device)[None, :, None]
        generator = torch.Generator(device).manual_seed(0)
        shape = (FETCHES, sizes.heads, sizes.pages)
        page = torch.randint(0, sizes.tokens // sizes.page_rows, shape, device=device, generator=generator)
        first = page * sizes.page_rows * sizes.row_bytes
        self.offsets = {
            True: (head * sizes.tokens * sizes.row_bytes + first).flatten(),
            False: (first * sizes.heads + head * sizes.row_bytes).flatten(),
        }

    def fetch(self, contiguous: bool, launches: int, number: int) -> None:
        """Launch fetch `number` on the current stream: its pages in `launches` equal parts."""
        sizes = self.sizes
        count = sizes.heads * sizes.pages
        parts = -(-sizes.page_rows * sizes.row_bytes // (FETCH_THREADS * FETCH_BYTES))
        for launch in range(launches):
            arguments = PageFetchArguments(
                pool=self.pool.device_pointer,
                offsets=self.offsets[contiguous].data_ptr(),
                out=self.out.data_ptr(),
                row_stride=sizes.row_bytes * (1 if contiguous else sizes.heads),
                first=number * count + launch * (count // launches),
                rows=sizes.page_rows,
                row_bytes=sizes.row_bytes,
            )
            self.kernels.launch("kvseek_page_fetch", (parts, count // launches, 1), FETCH_THREADS, arguments)

    def measure(self, contiguous: bool, launches: int) -> Result:
        """Time a variant: medians over repeats of FETCHES fetches."""

        def run() -> None:
            for number in range(FETCHES):
                self.fetch(contiguous, launches, number)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        in_graph, one_by_one = _seconds(graph.replay) / FETCHES, _seconds(run) / FETCHES
        rate = self.sizes.bytes_fetched / in_graph * 1e-9
        return Result(contiguous, launches, in_graph * 1e6, one_by_one * 1e6, rate)


def _seconds(call: Callable[[], object]) -> float:
    """Median seconds from the call to the end of what it launched."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or JSON with --output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=24, help="pages of a KV head")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of the pool, a multiple of 1,024")
    parser.add_argument("--page_rows", type=int, default=32)
    parser.add_argument("--head_dim", type=int, default=128, help="channels of 16 bits")
    parser.add_argument("--output", type=Path, help="write JSON there")
    options = parser.parse_args(arguments)
    if options.tokens % 1024 or options.tokens < 1024:
        parser.error(f"--tokens {options.tokens}: must be a positive multiple of 1,024, the tokens of an extent")
    if options.tokens % options.page_rows:
        parser.error(f"--page_rows {options.page_rows}: must divide --tokens {options.tokens}")
    sizes = Sizes(options.pages, options.heads, options.tokens, options.page_rows, 4 * options.head_dim)
    benchmark = PageFetch(sizes, torch.device("cuda", torch.cuda.current_device()))
    print(f"{torch.cuda.get_device_name()}: {sizes.bytes_fetched:,} bytes a fetch")
    print(f"{'contiguous':>10} {'launches':>8} {'graph us':>9} {'one by one us':>13} {'GB/s':>6}")
    results = []
    for contiguous in (True, False):
        for launches in (1, sizes.heads, sizes.heads * sizes.pages):
            found = benchmark.measure(contiguous, launches)
            results.append(found)
            name = "yes" if contiguous else "no"
            times = f"{found.in_graph_us:9.1f} {found.one_by_one_us:13.1f} {found.gigabytes_per_second:6.1f}"
            print(f"{name:>10} {launches:8d} {times}", flush=True)
    if options.output:
        report = {"sizes": asdict(sizes), "results": [asdict(result) for result in results]}
        write_result(options.output, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
