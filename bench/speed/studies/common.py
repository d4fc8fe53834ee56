"""What studies on a GPU share: their flags, the bench that these make, and the frame of their result."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from kvseek.bench.machine import describe, describe_gpu
from kvseek.bench.output import Figure, add_output_flags, figures_table, print_whole
from kvseek.bench.speed.device.bench import Bench
from kvseek.bench.speed.device.options import cells_of, parse

FLAGS = {  # of `kvseek bench --shape`
    "shape": "whose weights are random",
    "methods": "comma list",
    "contexts": "comma list of tokens",
    "offload": "where rows lie",
    "host_memory": "pinned, for rows",
}


def study_parser(description: str | None, **defaults: str) -> argparse.ArgumentParser:
    """A parser with --shape, the flags of FLAGS for which there is a default, --json and --output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"shape": "llama-3.1-8b", **defaults}.items():
        parser.add_argument(f"--{name}", default=default, help=f"{FLAGS[name]} (default: %(default)s)")
    add_output_flags(parser)
    return parser


def make_bench(own: argparse.Namespace, *flags: str, layers: int | None = None) -> Bench:
    """A bench of these settings; `flags` are more of `kvseek bench --shape`, `layers` as of Bench."""
    given = [word for name in FLAGS if name in own for word in (f"--{name}", getattr(own, name))]
    arguments = parse([*flags, *given])
    return Bench(arguments, cells_of(arguments), layers=layers)


def result(name: str, bench: Bench, results: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """The document of a study."""
    machine = {**describe(), "gpu": describe_gpu(bench.device)}
    head = {"benchmark": name, "machine": machine, "shape": bench.arguments.shape}
    return {**head, **settings, "results": list(results)}


def print_figures(document: dict[str, Any], figures: Mapping[str, Figure], key: str = "method") -> None:
    """Print a row for each result, beginning with what it has under `key`."""
    title = f"{document['shape']}, one {document['machine']['gpu']['name']}"
    print_whole(figures_table(title, key, figures, document["results"], key))
