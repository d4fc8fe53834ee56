"""Time to index a prompt's keys: CTkvr's query-centroid lists on the GPU, and Faiss's IVF and HNSW on host cores.

    python benchmarks/studies/qcivf.py --output benchmarks/results/NAME.json

One layer of a Llama-3.1-8B shape by default, synthetic keys and queries (synthetic_keys.py). Faiss needs `pip install faiss-cpu`;
--faiss none leaves it out, --profile adds the time of each kernel. What is counted: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvseek.benchmarks.synthetic_keys import SyntheticKeys
from kvseek.benchmarks.timing import Samples, measure
from kvseek.core.cuda import CudaKernels, cuda_device
from kvseek.core.errors import ConfigError, KernelError
from kvseek.measurement.gpu_kernels import method_kernels
from kvseek.measurement.machine import describe, describe_gpu, installed_version
from kvseek.measurement.output import run_command, write_result
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.device_build import DeviceBuilder

FAISS = ("ivf", "hnsw")
IVF_LISTS, HNSW_LINKS = 2048, 32
TOP_K, RECALL_FACTOR = 512, 2.5  # the paper's, whatever a Config's defaults: lists of 1,280 places


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_report)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line arguments; raises ConfigError on one out of range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    integers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--lengths", type=integers, default=[32_768, 65_536, 131_072], help="retrieval tokens")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--top_k",
        type=int,
        default=TOP_K,
        help=f"rows that a step selects; lists are {RECALL_FACTOR} times as long",
    )
    parser.add_argument("--repeats", type=int, default=5, help="builds that are timed, after one that is not")
    parser.add_argument("--faiss", default=",".join(FAISS), help="indexes of Faiss: ivf, hnsw, or none")
    parser.add_argument("--faiss_heads", type=int, default=1, help="KV heads indexed by Faiss; scaled to all")
    parser.add_argument("--faiss_threads", type=int, default=os.cpu_count(), help="host threads of Faiss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="report the time of each kernel of a build too")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    arguments.faiss = [] if arguments.faiss == "none" else arguments.faiss.split(",")
    for name in arguments.faiss:
        if name not in FAISS:
            raise ConfigError(f"faiss = {name!r}: must be some of {', '.join(FAISS)}, or none")
    for name in ("heads", "kv_heads", "head_dim", "top_k", "repeats", "faiss_heads", "faiss_threads"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"{name} = {getattr(arguments, name)}: must be >= 1; set --{name}")
    if min(arguments.lengths) < 1:
        raise ConfigError(f"lengths = {arguments.lengths}: must be >= 1; set --lengths")
    if arguments.heads % arguments.kv_heads:
        raise ConfigError(f"heads = {arguments.heads}: must be a multiple of kv_heads = {arguments.kv_heads}")
    if arguments.faiss_heads > arguments.kv_heads:
        raise ConfigError(f"faiss_heads = {arguments.faiss_heads}: must be at most kv_heads = {arguments.kv_heads}")
    return arguments


def load_faiss(arguments: argparse.Namespace) -> Any:
    """The module, told its number of threads; None if it is not wanted. Raises KernelError if it is missing."""
    if not arguments.faiss:
        return None
    try:
        faiss = importlib.import_module("faiss")
    except ImportError as error:
        raise KernelError(
            f"faiss is missing ({error}): pip install faiss-cpu, or leave it out with --faiss none"
        ) from None
    faiss.omp_set_num_threads(arguments.faiss_threads)
    return faiss


def configure(arguments: argparse.Namespace) -> Config:
    """What is built."""
    return Config(top_k=arguments.top_k, recall_factor=RECALL_FACTOR, execution="cpu")  # codes take no part in lists


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file, which is written after every length."""
    faiss = load_faiss(arguments)
    device = cuda_device()
    document: dict[str, Any] = {"benchmark": "qcivf", "machine": describe(), "gpu": describe_gpu(device)}
    document["faiss_library"] = {"version": installed_version("faiss-cpu"), "threads": arguments.faiss_threads}
    document |= {name: value for name, value in vars(arguments).items() if name not in ("output", "json")}
    document["results"] = []
    shape = (arguments.dtype, arguments.head_dim, arguments.heads // arguments.kv_heads)
    kernels = method_kernels("ctkvr", configure(arguments), *shape, device)
    for length in arguments.lengths:
        document["results"].append(measure_length(arguments, kernels, length, faiss))
        if arguments.output:
            write_result(arguments.output, document)
    return document


def measure_length(arguments: argparse.Namespace, kernels: CudaKernels, length: int, faiss: Any) -> dict[str, Any]:
    """Times of one length, in seconds for all KV heads of a layer."""
    source = SyntheticKeys(arguments.kv_heads, arguments.head_dim, kernels.device, seed=arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    config = configure(arguments)
    centroids = config.prompt_centroids(length, config.centroids)
    keys, queries = source.keys(length, dtype), source.queries(arguments.heads, centroids, dtype)
    build = make_build(arguments, kernels, queries, keys)
    samples, peak = time_build(build, keys.device, arguments.repeats)
    flop = 2 * arguments.heads * centroids * length * arguments.head_dim
    result: dict[str, Any] = {"length": length, "centroids": centroids, "rho": config.rho, "ctkvr": samples.summary()}
    result |= {"work_bytes": peak, "score_flop_per_second": flop / samples.median}
    if arguments.profile:
        result |= profile_build(build, keys.device)
    for name in arguments.faiss:
        seconds = [time_faiss(faiss, name, keys[head]) for head in range(arguments.faiss_heads)]
        scaled = sum(seconds) * arguments.kv_heads / arguments.faiss_heads
        result[name] = {"seconds_by_head": seconds, "scaled": scaled, "ratio": scaled / samples.median}
    return result


def make_build(
    arguments: argparse.Namespace, kernels: CudaKernels, queries: Tensor, keys: Tensor
) -> Callable[[], None]:
    """What is timed: the lists of all KV heads, from queries [H, C, D] and keys [G, n, D]."""
    config, group = configure(arguments), arguments.heads // arguments.kv_heads
    builder = DeviceBuilder(kernels, group, config.rho, arguments.head_dim**-0.5)
    lists = torch.empty((keys.shape[0], queries.shape[1], config.rho), dtype=torch.int32, device=keys.device)
    return lambda: builder.build(queries, keys, lists)


def time_build(build: Callable[[], None], device: torch.device, repeats: int) -> tuple[Samples, int]:
    """Seconds between two events around each build, and the most device memory that one allocates."""
    build()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    samples = Samples()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        build()
        end.record()
        end.synchronize()
        samples.seconds.append(start.elapsed_time(end) / 1000)
    return samples, torch.cuda.max_memory_allocated(device) - before


def profile_build(build: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Seconds of one build by kernel, dearest first, and seconds that the host takes to launch it."""
    torch.cuda.synchronize(device)
    host_seconds = measure(build)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        build()
        torch.cuda.synchronize(device)
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    times = [
        {"name": event.key, "seconds": event.self_device_time_total / 1e6, "count": event.count} for event in events
    ]
    return {"host_seconds": host_seconds, "kernels": times}


def time_faiss(faiss: Any, name: str, keys: Tensor) -> float:
    """Seconds in which Faiss indexes the keys [n, D] of one KV head by inner product; n >= IVF_LISTS for "ivf"."""
    if name == "ivf" and keys.shape[0] < IVF_LISTS:
        raise ConfigError(f"lengths = {keys.shape[0]}: must be >= {IVF_LISTS} for IVF; leave it out with --faiss hnsw")
    rows, dim = keys.float().cpu().numpy(), keys.shape[1]

    def build() -> None:
        if name == "hnsw":
            faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT).add(rows)
            return
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, IVF_LISTS, faiss.METRIC_INNER_PRODUCT)
        index.train(rows)
        index.add(rows)

    return measure(build)


def print_report(document: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(
        title=f"seconds to index one layer, {document['kv_heads']} KV heads of {document['head_dim']} numbers"
    )
    names = document["results"][0].keys() & set(FAISS)
    columns = ["tokens", "lists", "ctkvr ms", "TFLOP/s", "MiB"]
    columns += [column for name in FAISS if name in names for column in (f"{name} s", "ratio")]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for result in document["results"]:
        ours = result["ctkvr"]
        cells = [f"{result['length']:,}", str(result["centroids"]), f"{1e3 * ours['median']:.2f}"]
        cells += [f"{result['score_flop_per_second'] / 1e12:.0f}", f"{result['work_bytes'] / 2**20:.0f}"]
        for name in FAISS:
            if name in names:
                cells += [f"{result[name]['scaled']:.2f}", f"{result[name]['ratio']:,.0f}"]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    for result in document["results"]:
        print_profile(console, result)
    if names:
        heads, threads = document["faiss_heads"], document["faiss_threads"]
        console.print(
            f"Faiss: {heads} of {document['kv_heads']} KV heads measured on {threads} threads, scaled to all."
        )


def print_profile(console: Console, result: dict[str, Any]) -> None:
    """Print a length's kernels, if they were profiled."""
    if "kernels" not in result:
        return
    console.print(f"{result['length']:,} tokens: launched in {1e3 * result['host_seconds']:.2f} ms")
    for kernel in result["kernels"]:
        console.print(f"{1e3 * kernel['seconds']:9.3f} ms {kernel['count']:4}  {kernel['name'][:90]}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
