"""How much of the attention do the rows that a method keeps hold? Measured on a model's own queries and keys.

    python bench/accuracy/recall.py --model PATH --text FILE --methods NAME,NAME:field=value --budget 1024 --context 8192

All but the last --queries tokens are the prompt, whose index is built as the engine builds it; the last ones are decode
steps, one after another. Of the budget, the sink and the local window of the method's cache are taken off; the rest are
rows that it may keep per KV head (its field top_k), unless the method is named with a top_k of its own. `flat`, exact top
rows, keeps as many under the same window.
README.md says what the figures mean; a layer that a method attends to densely counts with all of its mass.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.bench.accuracy.capture import CapturedLayer, Replay, cached_capture
from kvseek.bench.machine import describe
from kvseek.bench.output import (
    Figure,
    add_output_flags,
    chosen_layers,
    command,
    figure,
    figures_table,
    print_whole,
    progress,
)
from kvseek.bench.variants import Variant, parse_variants
from kvseek.core.cpu_library import CpuLibrary
from kvseek.plugins.contract import LAST_QUERIES
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.registry import METHODS, get_method

CAPTURES = Path(".cache/captures")


@dataclass(frozen=True)
class Measure:
    """One layer of one method; shares in 0..1, rows per KV head."""

    method: str
    layer: int
    rows: float
    dense: bool  # every row was attended to
    mass: float
    flat_mass: float
    window_mass: float
    recall: float

    @property
    def ratio(self) -> float:
        """Mass kept, relative to exact top rows."""
        return self.mass / self.flat_mass


@torch.inference_mode()
def measure_layer(
    number: int, layer: CapturedLayer, steps: int, variant: Variant, library: CpuLibrary | None = None
) -> Measure:
    """One layer over its last `steps` queries; the variant's settings say how many rows are kept."""
    replay = Replay(layer, number, steps, variant, library)
    chosen, found = [], []
    queries = layer.queries[:, -steps:]
    for step in range(steps):
        query = queries[:, step].contiguous()
        tokens = replay.step(query)
        grouped = query.view(tokens.shape[0], -1, query.shape[1])
        exact = exact_top_k(grouped, replay.region, variant.settings.top_k, replay.scaling)
        chosen.append(tokens.sum(dim=1).float().mean())
        best = torch.zeros_like(tokens).scatter_(1, exact, True)
        found.append(torch.stack([*masses(replay, query, step, tokens, best), (tokens & best).sum() / best.sum()]))
    mass, flat_mass, window, recall = torch.stack(found).mean(dim=0).tolist()
    rows = float(torch.stack(chosen).mean())
    return Measure(variant.label, number, rows, rows == replay.length, mass, flat_mass, window, recall)


def masses(replay: Replay, query: Tensor, step: int, chosen: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of a decode step's softmax mass on window and chosen tokens, window and exact top rows, window alone.

    Parameters
    ----------
    query : Tensor [H, D]
        The step's.
    chosen, exact : Tensor, bool [G, n]
        Tokens of the retrieval region.
    """
    region = replay.region_weights(query, step)
    window = 1 - region.sum(dim=-1).mean()
    on_chosen, on_exact = ((region * part[:, None]).sum(dim=-1).mean() for part in (chosen, exact))
    return window + on_chosen, window + on_exact, window


def measure_methods(
    layers: Sequence[CapturedLayer],
    variants: Sequence[Variant],
    budget: int,
    steps: int,
    library: CpuLibrary | None,
    numbers: Sequence[int],
) -> list[dict[str, Any]]:
    """Every variant over the layers of these numbers; JSON-able, with the means over the layers that select."""
    results = []
    for variant in variants:
        sized = variant.within(budget)
        measures = []
        for number in numbers:
            measures.append(measure_layer(number, layers[number], steps, sized, library))
            progress(f"{variant.label} layer {number}: ratio {measures[-1].ratio:.3f}")
        results.append(
            {
                "method": variant.label,
                "top_k": sized.settings.top_k,
                "sink": sized.cache.sink,
                "local": sized.cache.local,
                "settings": dataclasses.asdict(sized.settings),
                **means(measures),
                "layers": [{**dataclasses.asdict(one), "ratio": one.ratio} for one in measures],
            }
        )
    return results


def means(measures: Sequence[Measure]) -> dict[str, Any]:
    """Means over layers; `ratio` is that of the mean masses, `selecting` the same over layers that select (or None)."""
    names = ("mass", "flat_mass", "window_mass", "recall", "rows")
    found: dict[str, Any] = {name: sum(getattr(one, name) for one in measures) / len(measures) for name in names}
    sparse = [one for one in measures if not one.dense]
    kept, best = (sum(getattr(one, name) for one in sparse) for name in ("mass", "flat_mass"))
    return {
        **found,
        "ratio": found["mass"] / found["flat_mass"],
        "selecting": kept / best if sparse else None,
        "worst_layer": min(measures, key=lambda one: one.ratio).layer,
    }


FIGURES: dict[str, Figure] = {
    "rows": lambda entry: str(entry["top_k"]),
    "window": lambda entry: f"{entry['sink']} + {entry['local']}",
    **{name: figure(name.replace(" ", "_"), ".3f") for name in ("mass", "flat mass", "ratio", "selecting")},
    "window\nalone": figure("window_mass", ".3f"),
    "recall": figure("recall", ".3f"),
    "worst\nlayer": lambda entry: str(entry["worst_layer"]),
}


def print_report(report: dict[str, Any]) -> None:
    """Print a row for each method and, if asked for, the ratios of every layer."""
    title = f"{report['model']}, {report['context']:,} tokens, {report['queries']} decode steps"
    print_whole(figures_table(title, "method", FIGURES, report["results"], "method"))
    if report["per_layer"]:
        figures: dict[str, Figure] = {}
        for number, layer in enumerate(report["results"][0]["layers"]):
            figures[f"layer\n{layer['layer']}"] = _layer(number)
        title = "mass / flat mass by layer; dense layers attend to everything"
        print_whole(figures_table(title, "method", figures, report["results"], "method"))


def _layer(number: int) -> Figure:
    def write(entry: dict[str, Any]) -> str:
        layer = entry["layers"][number]
        return "dense" if layer["dense"] else f"{layer['mass']:.3f}\n{layer['ratio']:.3f}"

    return write


def selecting_methods() -> str:
    """Comma list of the registered methods that keep a number of rows."""
    return ",".join(
        name for name in METHODS if "top_k" in {f.name for f in dataclasses.fields(get_method(name).config_class)}
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = result.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory or .gguf file")
    add("--text", type=Path, required=True, help="UTF-8 text, at least --context tokens long")
    add("--methods", default=selecting_methods(), help="comma list; NAME:field=value sets fields")
    add("--budget", type=int, default=1024, help="tokens attended to per KV head, window included")
    add("--context", type=int, default=8192, help="tokens, the decode steps' included")
    add("--queries", type=int, default=32, help="last positions, which stand for decode steps")
    add("--layers", help="comma list; all if left out")
    add(
        "--kernels", choices=("reference", "native"), default="reference", help="what selects: PyTorch or compiled code"
    )
    add("--captures", type=Path, default=CAPTURES, help="folder that keeps what was captured")
    add("--per_layer", action="store_true", help="print every layer's figures")
    add_output_flags(result)
    return result


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Capture, or read what was captured, and measure; the JSON-able report."""
    variants = parse_variants(options.methods)
    for variant in variants:
        variant.within(options.budget)
    library = None
    if options.kernels == "native":
        from kvseek.builder.compile.cpu import cached_cpu_library

        library = CpuLibrary(cached_cpu_library())
    wanted = min(options.context, LAST_QUERIES + options.queries)
    layers = cached_capture(options.model, options.text, options.context, wanted, options.captures)
    numbers = chosen_layers(options.layers, len(layers))
    return {
        "evaluation": "recall",
        "machine": describe(),
        "model": options.model.name,
        "text": options.text.name,
        **{name: getattr(options, name) for name in ("context", "queries", "budget", "kernels", "per_layer")},
        "results": measure_methods(layers, variants, options.budget, options.queries, library, numbers),
    }


main = command(parser().parse_args, run, print_report)

if __name__ == "__main__":
    sys.exit(main())
