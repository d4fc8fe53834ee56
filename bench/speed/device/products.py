"""Time of the products of a decode step with the matrices of Llama-3.1-8B, by format of the weights and number of rows.

`python -m kvseek.bench.speed.device.products` prints a line for each. Copies of a matrix follow each other in a CUDA graph, more
than the L2 cache holds, so that each is read from memory as in a step, and starts beside the end of the one before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvseek.bench.machine import describe_gpu
from kvseek.bench.methods import load_kernels
from kvseek.bench.speed.device.floors import elapsed_seconds, timing_event
from kvseek.builder.compile.cuda import Specialisation
from kvseek.core.config import FP8_GROUPS, WEIGHT_GROUP
from kvseek.core.weight_only import INT4, INT8_ASYMMETRIC, INT8_GROUPS, NONE, layout
from kvseek.kernels.cuda.layer.products import ProductKernels

READ = 4.4e12  # bytes per second: what a plain read of an H200's memory reaches
BYTES = 256 << 20  # of the copies of a matrix: several times the L2 cache
MOST_COPIES = 64
REPEATS = 7
MATRICES = {  # of Llama-3.1-8B: outputs, inputs, and whether gated
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}
FORMATS = {  # precision of the kernels, and that of the weights
    "16": (NONE, NONE),
    "int8": ("int8", "int8"),
    "fp8": ("fp8", "fp8"),
    INT4: (INT4, INT4),
    INT8_GROUPS: (INT8_GROUPS, INT8_GROUPS),
    INT8_ASYMMETRIC: (INT8_ASYMMETRIC, INT8_ASYMMETRIC),
    FP8_GROUPS: (FP8_GROUPS, FP8_GROUPS),
}


@dataclass(frozen=True)
class Weight:
    """A stored weight, and its scales."""

    numbers: Tensor
    scale: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.numbers.nbytes + (0 if self.scale is None else self.scale.nbytes)


def make_weight(outputs: int, inputs: int, precision: str, group: int, dtype: torch.dtype) -> Weight:
    """Random bits: speed does not depend on the numbers."""
    if precision == NONE:
        return Weight(torch.randn(outputs, inputs, device="cuda", dtype=dtype), None)
    (shape, kind), (scales, scale) = layout((outputs, inputs), precision, group)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    return Weight(bits.view(kind), torch.full(scales, 0.01, dtype=scale, device="cuda"))


def product_seconds(kernels: ProductKernels, weights: Sequence[Weight], rows: int, inputs: int, gated: bool) -> float:
    """Median seconds of a product."""
    x = torch.randn(rows, inputs, device="cuda").to(kernels.dtype)

    def multiply() -> None:
        for weight in weights:
            kernels.linear(x, weight.numbers, weight.scale, None, gated=gated)

    multiply()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply()
    times = []
    for repeat in range(REPEATS + 1):
        start, end = timing_event(), timing_event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat:
            times.append(elapsed_seconds(start, end))
    return statistics.median(times) / len(weights)


def main() -> None:
    """Print a line for each matrix, format and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--matrices", default=",".join(MATRICES))
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--weight_group", type=int, default=WEIGHT_GROUP)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    dtype, group, rows = getattr(torch, arguments.dtype), arguments.weight_group, arguments.rows.split(",")
    print(describe_gpu(torch.device("cuda")))
    print(f"us, and in brackets times of {READ / 1e12} TB/s, by rows {rows}")
    for name in arguments.formats.split(","):
        precision, own = FORMATS[name]
        unit = Specialisation(arguments.dtype, 64, 4, "full", (), precision, group)
        kernels = ProductKernels(load_kernels(unit), precision, dtype, group)
        for matrix in arguments.matrices.split(","):
            outputs, inputs, gated = MATRICES[matrix]
            first = make_weight(outputs, inputs, own, group, dtype)
            copies = min(MOST_COPIES, max(2, BYTES // first.nbytes))
            weights = [first, *(make_weight(outputs, inputs, own, group, dtype) for _ in range(copies - 1))]
            figures = []
            for number in map(int, rows):
                took = product_seconds(kernels, weights, number, inputs, gated)
                figures.append(f"{took * 1e6:7.2f} ({took * READ / first.nbytes:4.2f})")
            print(f"{name:12} {matrix:8} {' '.join(figures)}", flush=True)
            del weights, first


if __name__ == "__main__":
    main()
