"""What bits, scales, centring, cell widths, query bits and passes of nested key codes are worth on a model's own keys.

python evaluation/key_codes.py --model PATH --text FILE --context 8192 --queries 16 --output FILE

Variants of the codes that plugins/codes does not offer are made here, in float32. Exact rows are the top k by the mean of the
heads' softmax weights. `recall` is the share of them that a variant chose, `mass` the attention on its rows over that on the
exact ones: softmax over all tokens, of the retrieval region alone, mean over heads, steps and layers. docs/nested_codes.md has
the figures of SmolLM2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvseek.core.errors import KvseekError
from kvseek.evaluation.capture import CapturedLayer, cached_capture
from kvseek.evaluation.recall import CAPTURES
from kvseek.measurement.machine import describe
from kvseek.plugins.codes.key_codes import BITS, STEPS
from kvseek.plugins.codes.rotation import padded_dim, rotate, rotation_signs
from kvseek.plugins.codes.store import MOST_BLOCK_TOKENS
from kvseek.plugins.contract import LAST_QUERIES
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.shared.group import best_positions, query_lanes, reduce_scores

SINK, LOCAL = 64, 256  # tokens of the window that are no retrieval rows, as in an engine
TOP_K = 100
WHOLE = 1 << 30  # a block that holds any region
BLOCKS = (64, 1024, WHOLE, 0)
EXACT_REDUCTION = "softmax_mean"


@dataclass(frozen=True)
class Variant:
    """One way to encode keys and to choose rows.

    Attributes
    ----------
    bits : int
        Of the last choice; 16: keys are not quantised.
    first_bits : int
        Of the pass that finds candidates; 0: there is none.
    candidates : int
        Candidates for each row.
    first_reduce : str
        How heads agree on candidates: "largest" estimate, "largest over length" of the query, or a name of group.py.
    group_reduce : str
        How they agree on rows.
    step : float
        Width of a 4-bit cell.
    values : str
        "linear": the middles of the cells; "means": of a normal channel within a cell.
    scale : str
        "key": one a key, that of all 4 bits; "own": one a key for each number of bits; "block": one for 32 channels; "none": the
        key's length alone.
    block : int
        Neighbouring keys whose mean is subtracted from each of them; 0: nothing is.
    query_bits : int
        To which rotated queries are rounded; 0: they are not.
    rotated : bool
        Whether keys and queries are rotated.
    """

    bits: int = 4
    first_bits: int = 2
    candidates: int = 8
    first_reduce: str = "largest over length"
    group_reduce: str = EXACT_REDUCTION
    step: float = STEPS[BITS]
    values: str = "linear"
    scale: str = "key"
    block: int = MOST_BLOCK_TOKENS
    query_bits: int = 8
    rotated: bool = True

    def changes(self) -> str:
        """Name the fields that differ from the method's defaults."""
        default = Variant()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return ", ".join(f"{name} {value}" for name, value in changed.items()) or "defaults"


def variants() -> list[Variant]:
    """The rows of the table: the defaults, and one thing changed at a time."""
    one_pass = Variant(first_bits=0)
    changed = dataclasses.replace
    return [
        *(changed(one_pass, bits=bits, scale=scale) for bits in (4, 3, 2, 1) for scale in ("key", "own")[: 5 - bits]),
        *(changed(one_pass, bits=bits, values="means") for bits in (4, 2, 1)),
        *(changed(one_pass, bits=bits, scale=scale) for bits in (4, 2) for scale in ("block", "none")),
        *(changed(one_pass, bits=bits, block=block) for bits in (4, 2) for block in BLOCKS),
        *(changed(one_pass, bits=2, scale="own", step=0.25, block=block) for block in BLOCKS),
        *(changed(one_pass, bits=bits, rotated=False) for bits in (4, 2)),
        *(changed(one_pass, bits=bits, step=step) for bits in (4, 2) for step in (0.28, 0.30, 0.335, 0.34)),
        *(changed(one_pass, bits=2, scale="own", step=step) for step in (0.22, 0.24, 0.25, 0.26, 0.28)),
        *(changed(one_pass, query_bits=bits) for bits in (0, 16, 6, 4)),
        *(changed(one_pass, group_reduce=reduce) for reduce in ("mean", "max")),
        *(Variant(candidates=candidates) for candidates in (4, 8, 16)),
        *(
            Variant(candidates=candidates, first_reduce=reduce)
            for reduce in ("largest", "softmax_mean")
            for candidates in (4, 8, 16)
        ),
        *(Variant(first_bits=1, candidates=candidates) for candidates in (8, 16)),
        *(Variant(step=step) for step in (0.30, 0.335)),
        *(Variant(query_bits=bits) for bits in (16, 6, 4)),
        Variant(values="means"),
        Variant(scale="block"),
        *(Variant(group_reduce=reduce) for reduce in ("mean", "max")),
        *(Variant(block=block) for block in BLOCKS),
    ]


@dataclass(frozen=True)
class Truth:
    """A layer's retrieval region and what exact attention does with it.

    keys [G, n, D]; queries [steps, G, g, D]; weights [steps, G, n], mean over the heads; best [steps, G, k].
    """

    keys: Tensor
    queries: Tensor
    weights: Tensor
    best: Tensor
    scaling: float


def truth_of(layer: CapturedLayer, steps: int) -> Truth:
    """The last `steps` queries over the region of the tokens before them."""
    prompt = layer.keys.shape[1] - steps
    region = layer.keys[:, SINK : prompt - LOCAL]
    kv_heads, _, dim = region.shape
    queries = layer.queries[:, -steps:].reshape(kv_heads, -1, steps, dim).permute(2, 0, 1, 3).contiguous()
    weights, best = [], []
    for step, query in enumerate(queries):
        seen = layer.keys[:, : prompt + step + 1]
        attention = (query @ seen.transpose(1, 2) * layer.scaling).softmax(dim=-1).mean(dim=1)
        weights.append(attention[:, SINK : prompt - LOCAL])
        best.append(exact_top_k(query, region, TOP_K, EXACT_REDUCTION, layer.scaling))
    return Truth(region, queries, torch.stack(weights), torch.stack(best), layer.scaling)


def cell_values(bits: int, step: float, values: str) -> Tensor:
    """What each code of `bits` bits stands for, float32 [2^bits]."""
    cells = 1 << bits
    width = step * 16 / cells
    if values == "linear":
        return (torch.arange(cells) - (cells - 1) / 2) * width
    borders = (torch.arange(cells + 1, dtype=torch.float64) - cells / 2) * width
    borders[0], borders[-1] = -math.inf, math.inf
    density = torch.exp(-borders.square() / 2) / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(borders)
    means: Tensor = (density[:-1] - density[1:]) / (share[1:] - share[:-1])
    return means.float()


def estimated_keys(rotated: Tensor, bits: int, variant: Variant) -> Tensor:
    """Rotated keys as `bits` bits give them back: float32 [G, n, P] to [G, n, P]."""
    if bits == 16:
        return rotated
    block = 32 if variant.scale == "block" else rotated.shape[-1]
    parts = rotated.reshape(*rotated.shape[:-1], -1, block)
    length = parts.norm(dim=-1, keepdim=True)
    codes = (parts * math.sqrt(block) / (length * variant.step)).floor().clamp(-8, 7).long() + 8
    value = cell_values(bits, variant.step, variant.values)[codes >> (4 - bits)]
    if variant.scale == "none":
        scale = length / math.sqrt(block)
    else:
        kept = 4 if variant.scale == "key" else bits
        measured = cell_values(kept, variant.step, variant.values)[codes >> (4 - kept)]
        scale = parts.square().sum(-1, keepdim=True) / (measured * parts).sum(-1, keepdim=True)
    found: Tensor = value * scale.half().float()
    return found.flatten(-2)


def rounded(lanes: Tensor, bits: int) -> Tensor:
    """Queries rounded to `bits` bits with one step each; 0: as they are."""
    if bits == 0:
        return lanes
    step = lanes.abs().amax(dim=-1, keepdim=True) / ((1 << bits - 1) - 1)
    return (lanes / step).round() * step


def means_of(keys: Tensor, block: int) -> Tensor:
    """Mean of each key's block, keys [G, n, D] to [G, n, D]; zeros without blocks."""
    if block == 0:
        return torch.zeros_like(keys)
    parts = [keys[:, start : start + block] for start in range(0, keys.shape[1], block)]
    return torch.cat([part.mean(dim=1, keepdim=True).expand_as(part) for part in parts], dim=1)


def candidates_of(lanes: Tensor, keys: Tensor, of_means: Tensor, variant: Variant, scaling: float) -> Tensor:
    """Places that the first pass finds: lanes [G, lanes, P], keys [G, n, P], products with means [G, lanes, n] to int64 [G, c].

    The product with the mean of the first block counts for nothing.
    """
    estimates = lanes @ keys.transpose(1, 2) + of_means - of_means[..., :1]
    if variant.first_reduce == "largest":
        values = estimates.amax(dim=1)
    elif variant.first_reduce == "largest over length":
        values = (estimates / lanes.norm(dim=-1, keepdim=True)).amax(dim=1)
    else:
        values = reduce_scores(estimates, variant.first_reduce, scaling)
    return best_positions(values, min(keys.shape[1], variant.candidates * TOP_K))


def measure_layer(truth: Truth, variant: Variant, signs: Tensor) -> tuple[float, float, float]:
    """Recall, attention on the chosen rows and on the exact ones; means over steps and KV heads."""
    turn: Callable[[Tensor], Tensor] = (lambda x: rotate(x, signs)) if variant.rotated else (lambda x: x)
    means = means_of(truth.keys, variant.block)
    keys, means = turn(truth.keys - means), turn(means)
    last = estimated_keys(keys, variant.bits, variant)
    first = estimated_keys(keys, variant.first_bits, variant) if variant.first_bits else None
    found = []
    for queries, weights, best in zip(truth.queries, truth.weights, truth.best, strict=True):
        lanes = rounded(turn(query_lanes(queries, variant.group_reduce)), variant.query_bits)
        of_means = lanes @ means.transpose(1, 2)
        estimates = lanes @ last.transpose(1, 2) + of_means
        if first is None:
            rows = best_positions(reduce_scores(estimates, variant.group_reduce, truth.scaling), TOP_K)
        else:
            places = candidates_of(lanes, first, of_means, variant, truth.scaling)
            chosen = estimates.gather(2, places[:, None].expand(-1, lanes.shape[1], -1))
            values = reduce_scores(chosen, variant.group_reduce, truth.scaling)
            rows = places.gather(1, best_positions(values, TOP_K))
        marked = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, rows, True)
        masses = [(weights * marked).sum(dim=1).mean(), weights.gather(1, best).sum(dim=1).mean()]
        found.append(torch.stack([marked.gather(1, best).float().mean(), *masses]))
    recall, mass, exact = torch.stack(found).mean(dim=0).tolist()
    return recall, mass, exact


def measure(truths: Sequence[Truth], variant: Variant) -> dict[str, Any]:
    """Means over the layers; JSON-able."""
    dim = padded_dim(truths[0].keys.shape[2])
    layers = [measure_layer(truth, variant, rotation_signs(0, dim)) for truth in truths]
    recall, mass, exact = (sum(layer[i] for layer in layers) / len(layers) for i in range(3))
    return {**dataclasses.asdict(variant), "changes": variant.changes(), "recall": recall, "mass": mass / exact}


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory or .gguf file")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text, at least --context tokens long")
    parser.add_argument("--context", type=int, default=8192, help="tokens, the decode steps' included")
    parser.add_argument("--queries", type=int, default=16, help="last positions, which stand for decode steps")
    parser.add_argument("--every", type=int, default=3, help="measure every so many layers")
    parser.add_argument("--captures", type=Path, default=CAPTURES, help="folder that keeps what was captured")
    parser.add_argument("--output", type=Path, help="write the figures as JSON to this file")
    options = parser.parse_args(argv)
    try:
        wanted = min(options.context, LAST_QUERIES + options.queries)
        layers = cached_capture(options.model, options.text, options.context, wanted, options.captures)
    except (KvseekError, OSError) as error:
        print(f"key_codes: {error}", file=sys.stderr)
        return 1
    truths = [truth_of(layer, options.queries) for layer in layers[:: options.every]]
    results = []
    for variant in variants():
        results.append(measure(truths, variant))
        print(f"{results[-1]['recall']:.3f}  {results[-1]['mass']:.4f}  {results[-1]['changes']}", flush=True)
    if options.output is not None:
        report = {"evaluation": "key_codes", "machine": describe(), "model": options.model.name}
        sizes = {"context": options.context, "queries": options.queries, "every": options.every, "top_k": TOP_K}
        options.output.write_text(json.dumps({**report, **sizes, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
