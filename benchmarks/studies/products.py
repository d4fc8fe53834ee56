"""Products of few rows, with weights of 16 and 8 bits, against cuBLAS and torchao: `python benchmarks/studies/products.py`.

Every matrix of a layer and the head, with the rows of decode steps and of a prompt's chunk. Each time is of one product among
enough others that no weight stays in the second-level cache, in a CUDA graph, the contestants in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvseek.benchmarks.shapes import SHAPES, get_shape
from kvseek.builder.compile.cuda import Specialisation
from kvseek.core.config import ModelConfig
from kvseek.core.cuda import cuda_device
from kvseek.engine.model.linear import KernelLinear
from kvseek.engine.model.product_kernels import ProductKernels
from kvseek.engine.model.weight_only import NONE, PRECISIONS, quantise
from kvseek.measurement.flags import numbers
from kvseek.measurement.gpu_kernels import load_kernels
from kvseek.measurement.machine import describe, describe_gpu, installed_version
from kvseek.measurement.output import run_command

CACHE_BYTES = 200 << 20  # of 8-bit weights: several times the second-level cache
Product = Callable[[Tensor], Tensor]


def matrices(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Output and input channels of a layer's matrices, and of the head."""
    queries, keys = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    return {
        "qkv": (queries + keys, model.hidden_size),
        "o": (model.hidden_size, queries),
        "gate_up": (2 * model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
        "head": (model.vocab_size, model.hidden_size),
    }


class Contestants:
    """Copies of one matrix, as each contestant keeps it: lists of functions from x [rows, inputs] to [rows, outputs]."""

    def __init__(self, kernels: dict[str, ProductKernels], outputs: int, inputs: int, device: torch.device) -> None:
        copies = max(2, CACHE_BYTES // (outputs * inputs))
        weights = [torch.randn(outputs, inputs, device=device).mul_(0.02).bfloat16() for _ in range(copies)]
        self.products: dict[str, list[Product]] = {"cublas bfloat16": [_plain(weight) for weight in weights]}
        for precision, own in kernels.items():
            if precision == NONE:
                self.products["bfloat16"] = [KernelLinear(own, weight, None, None) for weight in weights]
                continue
            self.products[precision] = [KernelLinear(own, *quantise(weight, precision), None) for weight in weights]
            if (library := _torchao(precision)) is not None:
                self.products[f"torchao {precision}"] = [library(weight) for weight in weights]

    def times(self, x: Tensor, repeats: int) -> dict[str, float]:
        """Microseconds of one product by contestant: the median of `repeats` turns."""
        graphs = {name: _capture(products, x) for name, products in self.products.items()}
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(repeats):
            for name, graph in graphs.items():
                samples[name].append(_time(graph) / len(self.products[name]) * 1e3)
        return {name: statistics.median(times) for name, times in samples.items()}


def _plain(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def _torchao(precision: str) -> Callable[[Tensor], Product] | None:
    """torchao's weight-only product of a weight, without torch.compile; None if it is not installed."""
    try:
        import torchao.quantization as library
    except ImportError:
        return None
    configs = {"int8": library.Int8WeightOnlyConfig, "fp8": library.Float8WeightOnlyConfig}

    def make(weight: Tensor) -> Product:
        module: Any = torch.nn.Linear(
            weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype
        )
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        library.quantize_(module, configs[precision]())
        product: Product = module
        return product

    return make


@torch.no_grad()
def _capture(products: Sequence[Product], x: Tensor) -> torch.cuda.CUDAGraph:
    for product in products:
        product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    graph.replay()
    return graph


def _time(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def measure(model: ModelConfig, rows: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Times of every matrix and number of rows."""
    device = cuda_device()
    kernels = {}
    for precision in (NONE, *PRECISIONS):
        unit = Specialisation("bfloat16", model.head_dim, model.group_size, "full", weight_only_precision=precision)
        kernels[precision] = ProductKernels(load_kernels(unit, device), precision, torch.bfloat16)
    results: list[dict[str, Any]] = []
    for name, (outputs, inputs) in matrices(model).items():
        contestants = Contestants(kernels, outputs, inputs, device)
        for count in rows:
            x = torch.randn(count, inputs, device=device, dtype=torch.bfloat16)
            times = contestants.times(x, repeats)
            results.append({"matrix": name, "outputs": outputs, "inputs": inputs, "rows": count, "microseconds": times})
        del contestants
    return results


def print_report(document: dict[str, Any]) -> None:
    """A table: one line for each matrix and number of rows, and one for a layer; ratios to cuBLAS in brackets."""
    results = document["results"]
    names = list(results[0]["microseconds"])
    table = Table("matrix", "rows", *names, title="µs a product, × cuBLAS")
    sums: dict[int, dict[str, float]] = {}
    for entry in results:
        times = entry["microseconds"]
        total = sums.setdefault(entry["rows"], dict.fromkeys(names, 0.0))
        if entry["matrix"] != "head":
            for name in names:
                total[name] += times[name]
        table.add_row(f"{entry['matrix']} {entry['outputs']} × {entry['inputs']}", str(entry["rows"]), *_cells(times))
    for rows, total in sums.items():
        table.add_row("layer", str(rows), *_cells(total), style="bold")
    Console(width=160).print(table)


def _cells(times: dict[str, float]) -> list[str]:
    base = times["cublas bfloat16"]
    return [f"{time:.1f} ({time / base:.2f})" for time in times.values()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description="Products of few rows against cuBLAS and torchao.")
    parser.add_argument("--shape", default="llama-3.1-8b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,2048", help="comma list of rows of x")
    parser.add_argument("--repeats", type=int, default=15, help="timed turns of each contestant")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    rows = numbers("rows", arguments.rows, 1)
    return {
        "benchmark": "products",
        "machine": describe(),
        "gpu": describe_gpu(cuda_device()),
        "torchao": installed_version("torchao"),
        "shape": arguments.shape,
        "results": measure(get_shape(arguments.shape, 1), rows, arguments.repeats),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 after printing why not."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
