"""How well does retrieval keep what attention needs? Measured on real queries and keys, layer by layer.

    python evaluation/recall.py --model PATH --text FILE --tokens 8192 --queries 32 [--json]

The retrieval region is what lies between the sink and the local window; the queries are those of the last positions.
Per layer and group reduction:

recall      share of the exact top k (by the same group reduction) that was selected
mass        share of the region's true softmax mass in the selected rows, mean over query heads and queries
flat mass   the same for the exact top k
error       ‖estimated - exact scores‖ / ‖exact scores‖ over the whole region, with α correction and without
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvseek.benchmarks.output import show
from kvseek.engine.errors import KvseekError
from kvseek.engine.memory import ExtentTable, extents_for
from kvseek.evaluation.capture import CapturedLayer, capture, load_model, token_ids
from kvseek.plugins.base import IndexContext
from kvseek.plugins.common.group import GROUP_REDUCTIONS
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.pariskv.codebook import build_codebooks, rotate
from kvseek.plugins.pariskv.config import Config
from kvseek.plugins.pariskv.reference import ReferenceIndex, estimate_scores

SINK, LOCAL = 64, 256


@dataclass(frozen=True)
class Measure:
    """One layer under one group reduction; shares in 0..1."""

    layer: int
    group_reduce: str
    recall: float
    mass: float
    flat_mass: float

    @property
    def mass_ratio(self) -> float:
        """Mass kept, relative to the exact top k."""
        return self.mass / self.flat_mass


@dataclass(frozen=True)
class Error:
    """Relative error of the 4-bit estimate of q·k in one layer."""

    layer: int
    corrected: float
    uncorrected: float


def retrieval_region(layer: CapturedLayer) -> Tensor:
    """Keys between sink and local window, [G, n, D]."""
    return layer.keys[:, SINK : layer.keys.shape[1] - LOCAL]


def make_index(layer: CapturedLayer, config: Config) -> ReferenceIndex:
    """Index of the layer's retrieval region, in slot 0."""
    keys = retrieval_region(layer)
    (kv_heads, n, dim), heads = keys.shape, layer.queries.shape[0]
    extents = ExtentTable(1, extents_for(n), extents_for(n))
    extents.reserve(0, n)
    books = build_codebooks(config, dim)
    device, dtype = keys.device, keys.dtype
    context = IndexContext(
        0, heads, kv_heads, dim, layer.scaling, config, books, extents, [n], dtype, device, library=None
    )
    index = ReferenceIndex(context)
    index.build(0, keys, layer.queries)
    return index


def measure_layer(number: int, layer: CapturedLayer, config: Config) -> Measure:
    """Recall and mass of one layer, averaged over its queries."""
    keys = retrieval_region(layer)
    queries = layer.queries.transpose(0, 1).contiguous()
    selection = make_index(layer, config).select(queries, [0] * queries.shape[0])
    found, mass, flat_mass = [], [], []
    for request, query in enumerate(queries):
        grouped = query.reshape(keys.shape[0], -1, keys.shape[2])
        exact = exact_top_k(grouped, keys, config.top_k, config.group_reduce, layer.scaling)
        chosen = selection.rows[request].long()
        weights = (grouped @ keys.transpose(1, 2) * layer.scaling).softmax(dim=-1)
        found.append(_membership(chosen, keys.shape[1]).gather(1, exact).float().mean())
        mass.append(_mass(weights, chosen))
        flat_mass.append(_mass(weights, exact))
    means = (torch.stack(values).mean().item() for values in (found, mass, flat_mass))
    return Measure(number, config.group_reduce, *means)


def _membership(rows: Tensor, n: int) -> Tensor:
    """Which of n positions are among rows [G, k]: bool [G, n]."""
    return torch.zeros(rows.shape[0], n, dtype=torch.bool).scatter_(1, rows, True)


def _mass(weights: Tensor, rows: Tensor) -> Tensor:
    """Share of softmax weights [G, g, n] on rows [G, k], mean over query heads."""
    return weights.gather(2, rows[:, None].expand(-1, weights.shape[1], -1)).sum(dim=-1).mean()


def estimate_error(number: int, layer: CapturedLayer) -> Error:
    """Relative error of the estimate over all keys of the region, all query heads and queries."""
    errors = []
    keys = retrieval_region(layer)
    grouped = layer.queries.reshape(keys.shape[0], -1, keys.shape[2])
    exact = grouped @ keys.transpose(1, 2)
    for corrected in (True, False):
        index = make_index(layer, Config(alpha_correction=corrected))
        _, codes, weights = index.encode(keys)
        estimate = estimate_scores(rotate(grouped, index.signs), codes, weights, index.levels)
        errors.append(((estimate - exact).norm() / exact.norm()).item())
    return Error(number, *errors)


def run(layers: list[CapturedLayer], config: Config) -> dict[str, object]:
    """Measure all layers under every group reduction; a JSON-able report."""
    measures = [
        measure_layer(number, layer, dataclasses.replace(config, group_reduce=reduction))
        for number, layer in enumerate(layers)
        for reduction in GROUP_REDUCTIONS
    ]
    errors = [estimate_error(number, layer) for number, layer in enumerate(layers)]
    return {
        "retrieval_tokens": retrieval_region(layers[0]).shape[1],
        "queries": layers[0].queries.shape[1],
        "top_k": config.top_k,
        "averages": {name: _average([m for m in measures if m.group_reduce == name]) for name in GROUP_REDUCTIONS},
        "error": sum(e.corrected for e in errors) / len(errors),
        "error_without_alpha": sum(e.uncorrected for e in errors) / len(errors),
        "layers": [{**dataclasses.asdict(m), "mass_ratio": m.mass_ratio} for m in measures],
        "errors": [dataclasses.asdict(e) for e in errors],
    }


def _average(measures: list[Measure]) -> dict[str, float]:
    fields = ("recall", "mass", "flat_mass")
    means = {name: sum(getattr(m, name) for m in measures) / len(measures) for name in fields}
    return {**means, "mass_ratio": means["mass"] / means["flat_mass"]}


def print_report(report: dict[str, object]) -> None:
    """Print `run`'s report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=100)
    console.print(f"{report['retrieval_tokens']} retrieval tokens, {report['queries']} queries, top {report['top_k']}")
    table = Table("layer", "group_reduce", "recall", "mass", "flat mass", "ratio")
    fields = ("recall", "mass", "flat_mass", "mass_ratio")
    for row in report["layers"]:  # type: ignore[attr-defined]
        table.add_row(str(row["layer"]), row["group_reduce"], *(f"{row[name]:.3f}" for name in fields))
    table.add_section()
    for reduction, row in report["averages"].items():  # type: ignore[attr-defined]
        table.add_row("mean", reduction, *(f"{row[name]:.3f}" for name in fields))
    console.print(table)
    errors = Table("layer", "estimate error", "without alpha")
    for row in report["errors"]:  # type: ignore[attr-defined]
        errors.add_row(str(row["layer"]), f"{row['corrected']:.2%}", f"{row['uncorrected']:.2%}")
    errors.add_section()
    errors.add_row("mean", f"{report['error']:.2%}", f"{report['error_without_alpha']:.2%}")
    console.print(errors)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description="Recall and softmax mass kept by pariskv on a model's own keys.")
    result.add_argument("--model", type=Path, required=True, help="Hugging Face directory or .gguf file")
    result.add_argument("--text", type=Path, required=True, help="UTF-8 text, at least --tokens tokens long")
    result.add_argument("--tokens", type=int, default=8192)
    result.add_argument("--queries", type=int, default=32, help="last positions whose queries are measured")
    result.add_argument("--top_k", type=int, default=Config().top_k)
    result.add_argument("--json", action="store_true", help="print the report as JSON")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parser().parse_args(arguments)
    if not 0 < options.queries <= LOCAL or options.tokens < SINK + LOCAL + options.top_k:
        least = SINK + LOCAL + options.top_k
        parser().error(f"--queries must be in 1..{LOCAL} and --tokens at least {least} (sink, local window, top_k)")
    try:
        model, tokenizer = load_model(options.model)
        ids = token_ids(tokenizer, options.text.read_text(encoding="utf-8"), options.tokens)
        report = run(capture(model, ids, options.queries), Config(top_k=options.top_k))
    except (KvseekError, OSError) as error:
        print(f"recall: {error}", file=sys.stderr)
        return 1
    show(report, options.json, print_report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
