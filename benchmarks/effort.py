"""What a smaller effort costs ParisKV at long context: recall and attention mass by region length and beta, on a GPU.

    python benchmarks/effort.py --lengths 131072,262144,524288,786432 --betas 0.1,0.05,0.03,0.02

Keys and queries are synthetic (synthetic.py). One layer of a Llama-3.1-8B shape; what a step pays for beta is in the
decode benchmark. The figures chose the last steps of plugins/pariskv/config.py's schedule.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.benchmarks.shapes import SHAPES
from kvseek.benchmarks.synthetic import SyntheticKeys
from kvseek.builder.compile_cuda import Specialisation, cached_cubin
from kvseek.engine.cuda import CudaKernels
from kvseek.engine.memory import ExtentTable, extents_for
from kvseek.plugins.base import IndexContext
from kvseek.plugins.flat.method import exact_top_k
from kvseek.plugins.pariskv import codebook
from kvseek.plugins.pariskv.config import Config, ScheduleStep
from kvseek.plugins.pariskv.device import CudaIndex, cuda_defines

KEYS_AT_ONCE = 65_536
DTYPE = torch.bfloat16


def make_index(config: Config, tokens: int, shape: str) -> CudaIndex:
    """An empty index with room for `tokens` tokens of one slot."""
    model, device = SHAPES[shape], torch.device("cuda")
    major, minor = torch.cuda.get_device_capability()
    defines = tuple(sorted(cuda_defines(config, model.head_dim, model.group_size).items()))
    kernels = Specialisation("bfloat16", model.head_dim, model.group_size, "pariskv", defines)
    table = ExtentTable(1, extents_for(tokens), extents_for(tokens), device)
    table.reserve(0, tokens)
    context = IndexContext(
        layer=0,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        scaling=model.head_dim**-0.5,
        config=config,
        codebooks=codebook.build_codebooks(config, model.head_dim),
        extents=table,
        lengths=[tokens],
        dtype=DTYPE,
        device=device,
        library=None,
        cuda=CudaKernels(cached_cubin(kernels, 10 * major + minor)),
    )
    return CudaIndex(context)


def fill(index: CudaIndex, source: SyntheticKeys, tokens: int) -> Tensor:
    """Synthetic keys, in the index and returned [G, tokens, D]."""
    keys = torch.empty(index.context.num_kv_heads, tokens, index.context.head_dim, dtype=DTYPE, device="cuda")
    for start in range(0, tokens, KEYS_AT_ONCE):
        part = source.keys(min(KEYS_AT_ONCE, tokens - start), DTYPE)
        keys[:, start : start + part.shape[1]] = part
    index.build(0, keys, keys[:, :0])
    return keys


def measure(index: CudaIndex, keys: Tensor, queries: Tensor) -> tuple[float, float]:
    """Recall of the exact top k, and the mass on the selected rows over that on the exact ones; queries [n, H, D]."""
    context, config = index.context, index.config
    recalls, shares = [], []
    for query in queries:
        rows = index.select(query[None], [0]).rows[0].long()
        for head in range(context.num_kv_heads):
            own, grouped = keys[head : head + 1].float(), query.view(context.num_kv_heads, -1, context.head_dim)
            lanes = grouped[head : head + 1].float()
            exact = exact_top_k(lanes, own, config.top_k, config.group_reduce, context.scaling)
            weights = (lanes @ own.transpose(1, 2) * context.scaling).softmax(dim=-1).mean(dim=1)
            recalls.append(torch.isin(rows[head], exact[0]).float().mean().item())
            shares.append((weights[0, rows[head]].sum() / weights[0, exact[0]].sum()).item())
    return statistics.mean(recalls), statistics.mean(shares)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each length and beta."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--lengths", default="131072,262144,524288,786432", help="comma list of retrieval tokens")
    parser.add_argument("--betas", default="0.1,0.05,0.03,0.02", help="comma list of shares that are reranked")
    parser.add_argument("--rho", type=float, default=0.2)
    parser.add_argument("--queries", type=int, default=16)
    arguments = parser.parse_args(argv)
    config = Config()
    print("tokens     beta  candidates  recall  mass of exact")
    for tokens in map(int, arguments.lengths.split(",")):
        index = make_index(config, tokens, arguments.shape)
        model = SHAPES[arguments.shape]
        source = SyntheticKeys(model.num_kv_heads, model.head_dim, torch.device("cuda"))
        keys = fill(index, source, tokens)
        queries = source.queries(model.num_heads, arguments.queries, DTYPE).transpose(0, 1).contiguous()
        for beta in map(float, arguments.betas.split(",")):
            index.config = dataclasses.replace(config, schedule_steps=(ScheduleStep(None, arguments.rho, beta),))
            recall, share = measure(index, keys, queries)
            print(f"{tokens:9,}  {beta:.3f}  {index.plan(tokens)[1]:10,}  {recall:6.1%}  {share:13.1%}", flush=True)
        del index, keys
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
