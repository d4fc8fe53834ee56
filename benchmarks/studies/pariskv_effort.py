"""What a smaller effort costs ParisKV at long context: recall and attention mass by region length and beta.

    python benchmarks/studies/pariskv_effort.py --lengths 131072,262144,524288,786432 --betas 0.1,0.05,0.03,0.02

Synthetic keys and queries (synthetic_keys.py), one KV head of four query heads, head size 128, on the CPU. What a step pays for
beta is in the decode benchmark. plugins/pariskv/README.md says what was made of the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.benchmarks.synthetic_keys import SyntheticKeys
from kvseek.builder.compile.cpu import cached_cpu_library
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.measurement.index_batch import batch_of
from kvseek.plugins.contract import IndexContext
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.pariskv import codebook
from kvseek.plugins.pariskv.config import Config, ScheduleStep
from kvseek.plugins.pariskv.native import NativeIndex

HEADS, DIM = 4, 128
KEYS_AT_ONCE = 65_536


def make_index(config: Config, tokens: int) -> NativeIndex:
    """An empty index with room for `tokens` tokens of one slot."""
    table = ExtentTable(1, extents_for(tokens), extents_for(tokens))
    table.reserve(0, tokens)
    context = IndexContext(
        layer=0,
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=DIM,
        scaling=DIM**-0.5,
        config=config,
        codebooks=codebook.build_codebooks(config, DIM),
        extents=table,
        lengths=[tokens],
        dtype=torch.float32,
        device=torch.device("cpu"),
        library=CpuLibrary(cached_cpu_library()),
    )
    return NativeIndex(context)


def keys_and_queries(tokens: int, queries: int) -> tuple[Tensor, Tensor]:
    """Keys [1, tokens, D], and queries [queries, H, D] that look for a topic each, the same for the same numbers."""
    source = SyntheticKeys(1, DIM, torch.device("cpu"), seed=tokens)
    parts = [source.keys(min(KEYS_AT_ONCE, tokens - start)) for start in range(0, tokens, KEYS_AT_ONCE)]
    source.spectrum = dataclasses.replace(source.spectrum, run_tokens=1)
    return torch.cat(parts, dim=1), source.queries(HEADS, queries).transpose(0, 1).contiguous()


def measure(index: NativeIndex, keys: Tensor, queries: Tensor) -> tuple[float, float]:
    """Recall of the exact top k, and the mass on the selected rows over that on the exact ones."""
    config, scaling, batch = index.config, index.context.scaling, batch_of(index)
    recalls, shares = [], []
    for query in queries:
        rows = index.select(query[None], batch).rows[0, 0].long()
        exact = exact_top_k(query[None], keys, config.top_k, config.group_reduce, scaling)[0]
        weights = (query @ keys[0].T * scaling).softmax(dim=-1).mean(dim=0)
        recalls.append(torch.isin(rows, exact).float().mean().item())
        shares.append((weights[rows].sum() / weights[exact].sum()).item())
    return statistics.mean(recalls), statistics.mean(shares)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each length and beta."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", default="131072,262144,524288,786432", help="comma list of retrieval tokens")
    parser.add_argument("--betas", default="0.1,0.05,0.03,0.02", help="comma list of shares that are reranked")
    parser.add_argument("--rho", type=float, default=0.2)
    parser.add_argument("--queries", type=int, default=48)
    arguments = parser.parse_args(argv)
    config = Config()
    print("   tokens   beta  recall  mass of exact")
    for tokens in map(int, arguments.lengths.split(",")):
        index = make_index(config, tokens)
        keys, queries = keys_and_queries(tokens, arguments.queries)
        index.build(0, keys, keys[:, :0])
        for beta in map(float, arguments.betas.split(",")):
            index.config = dataclasses.replace(config, schedule_steps=(ScheduleStep(None, arguments.rho, beta),))
            recall, share = measure(index, keys, queries)
            print(f"{tokens:9,}  {beta:.3f}  {recall:6.1%}  {share:13.1%}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
