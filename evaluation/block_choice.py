"""How much attention is lost when a chunk of a prompt attends to chosen blocks of keys, by the rule that chooses them.

    python evaluation/block_choice.py --model PATH --text FILE --tokens 8192 --budgets 1024,2048 --layers 0,7,15,23,29

Every rule chooses as engines do (engine/model/block_sparse.py): for each KV head and block of queries, from the keys before it,
the first and the latest blocks always. `lost` is the share of the exact attention, softmax over all keys, on keys not chosen:
mean over queries, heads and layers. A query looks *sharply* at a block that has more than 40 % of its attention; `sharp` is the
share of these that were chosen. docs/sparse_prompts.md has the figures of SmolLM2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvseek.core.config import KEY_BLOCK, BlockSparseConfig
from kvseek.core.errors import ConfigError
from kvseek.engine.model import block_sparse
from kvseek.evaluation.capture import CapturedLayer, cached_capture
from kvseek.evaluation.recall import CAPTURES, chosen_layers
from kvseek.measurement.flags import numbers
from kvseek.measurement.machine import describe
from kvseek.measurement.output import run_command

SHARP = 0.4
STRIDE = 16  # of XAttention's antidiagonals
POOLED = 16  # queries whose mean stands for them
QUOKA_QUERIES = 16
Rule = Callable[[Tensor, Tensor, float], Tensor]
"""Queries [G, r, q, D], keys [G, p, D] and the softmax scale to a mark of each block of KEY_BLOCK keys, [G, p / KEY_BLOCK]."""


@dataclass
class Loss:
    """What one rule loses with one budget, summed over layers and blocks of queries."""

    lost: float = 0.0
    blocks: int = 0
    sharp: int = 0
    sharp_chosen: int = 0


def sampled(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """The engine's: exact attention of evenly spread queries."""
    samples = block_sparse.sample(queries.flatten(0, 1), len(keys), queries.shape[2], BlockSparseConfig.samples)
    return block_sparse.block_mass(samples, keys, scaling).sum(dim=1)


def pooled_queries(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Exact attention of the means of 16 queries each."""
    return block_sparse.block_mass(pooled(queries)[:, None], keys, scaling)[:, 0]


def pooled_keys(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention of all queries to the mean keys of blocks."""
    return over_blocks(queries.flatten(1, 2), keys, scaling)


def pooled_both(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention of mean queries to mean keys, as FlexPrefill's query-aware heads."""
    return over_blocks(pooled(queries), keys, scaling)


def mean_and_spread(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """As `pooled_keys`, with half of the variance that a block's scores would have with independent channels."""
    rows, blocks = queries.flatten(1, 2), block_sparse.cut(keys, KEY_BLOCK)
    variance = torch.matmul(rows.square(), blocks.var(dim=2, correction=0).mT)
    scores = torch.matmul(rows, blocks.mean(dim=2).mT) * scaling + 0.5 * scaling**2 * variance
    return scores.softmax(dim=-1).sum(dim=1)


def antidiagonals(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Sums along antidiagonals of 16 queries and keys, as XAttention."""
    rows = block_sparse.cut(queries.flatten(1, 2), STRIDE).flatten(2)
    columns = block_sparse.cut(keys, STRIDE).flip(2).flatten(2)
    weights = (torch.matmul(rows, columns.mT) * (scaling / STRIDE)).softmax(dim=-1).sum(dim=1)
    return weights.view(len(keys), -1, KEY_BLOCK // STRIDE).sum(dim=2)


def unlike_queries(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Largest cosine between a block's keys and the queries least like the mean query, as QuoKA chooses keys."""
    likeness = F.cosine_similarity(queries, queries.mean(dim=2, keepdim=True), dim=-1)
    places = likeness.topk(QUOKA_QUERIES, dim=-1, largest=False).indices[..., None].expand(-1, -1, -1, queries.shape[3])
    rows = F.normalize(queries.gather(2, places), dim=-1).mean(dim=1)
    likest = torch.matmul(rows, F.normalize(keys, dim=-1).mT).amax(dim=1)
    return likest.view(len(keys), -1, KEY_BLOCK).amax(dim=2)


def pooled(queries: Tensor) -> Tensor:
    """Return means of POOLED queries each: queries [G, r, q, D] to [G, r * q / POOLED, D]."""
    return block_sparse.cut(queries.flatten(1, 2), POOLED).mean(dim=2)


def over_blocks(rows: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention of rows [G, n, D] to the mean keys of blocks, summed over the rows."""
    means = block_sparse.cut(keys, KEY_BLOCK).mean(dim=2)
    return (torch.matmul(rows, means.mT) * scaling).softmax(dim=-1).sum(dim=1)


RULES: dict[str, Rule] = {
    "sampled queries": sampled,
    "pooled queries": pooled_queries,
    "antidiagonals": antidiagonals,
    "mean and spread": mean_and_spread,
    "pooled keys": pooled_keys,
    "pooled queries and keys": pooled_both,
    "unlike queries": unlike_queries,
}
NOTHING_MORE = torch.zeros(1, 1, dtype=torch.int64)  # no block is chosen for its text: scores are compared
BEST = "best blocks"  # by the exact attention of all queries


def measure(layer: CapturedLayer, start: int, query_block: int, budgets: Sequence[int], found: dict[Any, Loss]) -> None:
    """Add what is lost by queries start .. start + query_block - 1 of a layer, of which all queries are there."""
    kv_heads = layer.keys.shape[0]
    past, stop = start // KEY_BLOCK * KEY_BLOCK, start + query_block
    queries = layer.queries[:, start:stop].reshape(kv_heads, -1, query_block, layer.queries.shape[2])
    keys, later = layer.keys, torch.arange(stop) > torch.arange(start, stop)[:, None]
    scores = torch.matmul(queries, keys[:, None, :stop].mT) * layer.scaling
    weights = scores.masked_fill_(later, -torch.inf).softmax(dim=-1)[..., :past].flatten(1, 2)
    mass = weights.reshape(kv_heads, weights.shape[1], -1, KEY_BLOCK).sum(dim=3)
    sought = mass[..., 1 : -block_sparse.LATEST].max(dim=-1)
    sharp = sought.values > SHARP
    for name, rule in {BEST: None, **RULES}.items():
        marks = mass.sum(dim=1) if rule is None else rule(queries, keys[:, :past], layer.scaling)
        for budget in budgets:
            chosen = block_sparse.choose(marks[:, None].clone(), budget // KEY_BLOCK, NOTHING_MORE)[:, 0]
            taken = torch.zeros(marks.shape, dtype=torch.bool).scatter_(1, chosen, value=True)
            loss = found.setdefault((name, budget), Loss())
            loss.lost += float((mass * ~taken[:, None]).sum(dim=2).mean())
            loss.blocks += 1
            loss.sharp += int(sharp.sum())
            loss.sharp_chosen += int((taken.gather(1, sought.indices + 1) & sharp).sum())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory or GGUF file")
    add("--text", type=Path, required=True)
    add("--tokens", type=int, default=8192, help="of the text")
    add("--budgets", default="1024,2048", help="comma list of tokens that are chosen, multiples of 64")
    add("--starts", default="3072,5120,7168", help="comma list of positions at which a block of queries begins")
    add("--query_block", type=int, default=BlockSparseConfig.query_block, help="queries that attend to the same blocks")
    add("--captures", type=Path, default=CAPTURES, help="folder that keeps what was captured")
    add("--layers", help="comma list; all if left out")
    add("--json", action="store_true", help="print JSON, not a table")
    add("--output", type=Path, help="result file")
    return parser.parse_args(argv)


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all rules; returns the document."""
    budgets = numbers("budgets", arguments.budgets, (1 + block_sparse.LATEST) * KEY_BLOCK)
    starts = numbers("starts", arguments.starts, 1)
    last = arguments.tokens - arguments.query_block
    if not all(max(budgets) < start <= last for start in starts):
        raise ConfigError(f"--starts = {arguments.starts}: must be > {max(budgets)}, the largest budget, and <= {last}")
    layers = cached_capture(arguments.model, arguments.text, arguments.tokens, arguments.tokens, arguments.captures)
    found: dict[Any, Loss] = {}
    for number in chosen_layers(arguments.layers, len(layers)) or range(len(layers)):
        for start in starts:
            measure(layers[number], start, arguments.query_block, budgets, found)
    results = [
        {
            "rule": name,
            "budget": budget,
            "lost": loss.lost / loss.blocks,
            "sharp": loss.sharp_chosen / max(1, loss.sharp),
        }
        for (name, budget), loss in found.items()
    ]
    settings = {name: str(value) for name, value in vars(arguments).items() if name not in ("json", "output")}
    return {"evaluation": "block_choice", "settings": settings, "machine": describe(), "results": results}


def print_table(document: dict[str, Any]) -> None:
    """Print what is lost by rule and budget."""
    table = Table("rule", "budget", "lost", "sharp", title="attention to blocks that were not chosen")
    for entry in document["results"]:
        table.add_row(entry["rule"], f"{entry['budget']:,}", f"{entry['lost']:.2%}", f"{entry['sharp']:.1%}")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    return run_command(argv, parse, run, print_table)


if __name__ == "__main__":
    sys.exit(main())
