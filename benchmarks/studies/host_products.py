"""Matrix products of a layer on the CPU, PyTorch's against what engines use: `python benchmarks/studies/host_products.py`.

Rows of x are those of decode steps and of a prompt's chunk. Every product is with another weight than the one before, and
all weights together exceed the caches, as in a step. The contestants take turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvseek.benchmarks.timing import CLOCKS, interleave
from kvseek.builder.compile.cpu import cached_cpu_library
from kvseek.core.cpu_library import CpuLibrary
from kvseek.engine.model import bfloat16
from kvseek.engine.model.host_products import HostProducts
from kvseek.engine.model.linear import Product, Products
from kvseek.engine.model.weight_only import quantise
from kvseek.measurement.flags import numbers
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command

MATRICES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}  # of SmolLM2-135M
LAYERS = 30
BASE = "float32, PyTorch"


def contestants(outputs: int, inputs: int) -> dict[str, tuple[torch.dtype, Sequence[Product]]]:
    """Products with the same weights, a product for each layer, as each contestant keeps them; and the dtype of x."""
    weights = [torch.randn(outputs, inputs) / inputs**0.5 for _ in range(LAYERS)]
    made: dict[str, tuple[torch.dtype, Sequence[Product]]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for who, products in (("PyTorch", Products(dtype)), ("kvseek", HostProducts(dtype))):
            made[f"{name}, {who}"] = dtype, [products.linear(weight.to(dtype)) for weight in weights]
    quantised = [quantise(weight, "int8") for weight in weights]
    products = HostProducts(torch.bfloat16, CpuLibrary(cached_cpu_library()))
    made["int8, PyTorch"] = torch.bfloat16, [pytorch_bytes(weight, scale.bfloat16()) for weight, scale in quantised]
    made["int8, kvseek"] = torch.bfloat16, [products.linear(weight, None, scale) for weight, scale in quantised]
    return made


def pytorch_bytes(weight: Tensor, scale: Tensor) -> Product:
    """Make PyTorch's product of bfloat16 rows with an int8 weight."""
    return lambda x: torch._weight_int8pack_mm(x, weight, scale)


def caller(linears: Sequence[Product], x: Tensor) -> Callable[[], Tensor]:
    """Make a function that multiplies x with the weight of the next layer each time."""
    turn = itertools.cycle(linears)
    return lambda: next(turn)(x)


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it goes into the result file."""
    torch.set_num_threads(arguments.threads)
    bfloat16.usable()  # keeps oneDNN from instructions that are advertised and fault
    results: list[dict[str, Any]] = []
    rows = numbers("rows", arguments.rows, 1)
    for name, (outputs, inputs) in MATRICES.items():
        made = contestants(outputs, inputs)
        for count in rows:
            x = torch.randn(count, inputs)
            calls = {who: caller(linears, x.to(dtype)) for who, (dtype, linears) in made.items()}
            repeats = LAYERS * (10 if count <= 64 else 1)
            samples = interleave(calls, repeats, LAYERS, LAYERS if count <= 64 else 3, CLOCKS[arguments.clock])
            times = {who: one.median for who, one in samples.items()}
            results.append({"matrix": name, "outputs": outputs, "inputs": inputs, "rows": count, "seconds": times})
    return {"benchmark": "host_products", "machine": describe(), "layers": LAYERS, "results": results}


def print_report(document: dict[str, Any]) -> None:
    """Print the products of all layers: milliseconds, TFLOP/s, and the ratio to PyTorch's float32."""
    results = document["results"]
    names = list(results[0]["seconds"])
    table = Table(
        "rows", *names, title=f"products of {document['layers']} layers of SmolLM2-135M: ms (× {BASE}; GFLOP/s)"
    )
    for rows in sorted({entry["rows"] for entry in results}):
        own = [entry for entry in results if entry["rows"] == rows]
        total = {name: sum(entry["seconds"][name] for entry in own) * document["layers"] for name in names}
        work = sum(2 * rows * entry["outputs"] * entry["inputs"] for entry in own) * document["layers"]
        cells = [
            f"{total[name] * 1e3:.1f} ({total[name] / total[BASE]:.2f}; {work / total[name] / 1e9:.0f})"
            for name in names
        ]
        table.add_row(f"{rows:,}", *cells)
    Console(width=160).print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description="Products on the CPU: PyTorch's operator against what engines use.")
    parser.add_argument("--rows", default="1,2,4,8,32,64,512,2048", help="comma list of rows of x")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="as in benchmarks/decode.py")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 after printing why not."""
    return run_command(argv, parse, run, print_report)


if __name__ == "__main__":
    sys.exit(main())
