"""What studies of compiled CPU kernels share: shapes and dtypes, the flags that choose among them, and PyTorch beside kvseek."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import torch

from kvseek.builder.compile.cpu import cached_cpu_library
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import ConfigError

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.1-8b": (32, 8, 128)}  # query heads, KV heads, head size
DTYPES = ("float32", "bfloat16")
PYTORCH, KERNEL = "PyTorch", "kvseek"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of shapes, dtypes, threads, repeats and output."""
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"comma list of {', '.join(SHAPES)}")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma list")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each contestant")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def begin(arguments: argparse.Namespace, *counts: str) -> tuple[list[tuple[str, torch.dtype]], CpuLibrary]:
    """Set seed and threads; returns every shape with every dtype, and the compiled kernels.

    Raises ConfigError on shapes and dtypes that are not known, and on `counts` (names of flags), threads or repeats below 1.
    """
    shapes, dtypes = arguments.shapes.split(","), arguments.dtypes.split(",")
    for name, found, known in (("shapes", shapes, tuple(SHAPES)), ("dtypes", dtypes, DTYPES)):
        if not set(found) <= set(known):
            raise ConfigError(f"--{name} = {','.join(found)!r}: must be a comma list of {', '.join(known)}")
    for name in (*counts, "threads", "repeats"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} = {getattr(arguments, name)}: must be at least 1")
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    kinds = [(shape, getattr(torch, dtype)) for shape, dtype in product(shapes, dtypes)]
    return kinds, CpuLibrary(cached_cpu_library())
