"""Keys, queries and indexes of one layer on the CPU, for tests of what an index stores and selects."""

from __future__ import annotations

import torch
from torch import Tensor

from kvseek.core.extents import ExtentTable
from kvseek.plugins.contract import IndexContext
from kvseek.plugins.flat import config as flat_config
from kvseek.plugins.flat.method import FlatIndex
from kvseek.plugins.pariskv import codebook
from kvseek.plugins.pariskv.config import Config
from kvseek.plugins.pariskv.reference import ReferenceIndex

KV_HEADS = 2


def make_context(config: object, head_dim: int, group: int, lengths: list[int], extents: int = 8) -> IndexContext:
    table = ExtentTable(len(lengths), extents, extents)
    for slot in range(len(lengths)):
        table.reserve(slot, lengths[slot])
    books = codebook.build_codebooks(config, head_dim) if isinstance(config, Config) else {}
    return IndexContext(
        layer=0,
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        scaling=head_dim**-0.5,
        config=config,
        codebooks=books,
        extents=table,
        lengths=lengths,
        dtype=torch.float32,
        device=torch.device("cpu"),
        library=None,
    )


def random_keys(n: int, head_dim: int, seed: int = 0) -> Tensor:
    """Keys with a common offset and a few loud channels, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    scale = 1 + 5 * (torch.rand(KV_HEADS, 1, head_dim, generator=generator) > 0.9)
    return (torch.randn(KV_HEADS, n, head_dim, generator=generator) + 0.5) * scale


def random_queries(batch: int, heads: int, head_dim: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def make_index(config: Config, head_dim: int, group: int, keys: Tensor) -> ReferenceIndex:
    index = ReferenceIndex(make_context(config, head_dim, group, [keys.shape[1]]))
    index.build(0, keys, torch.empty(0))
    return index


def make_flat(top_k: int, group_reduce: str, keys: Tensor, group: int) -> FlatIndex:
    config = flat_config.Config(top_k=top_k, group_reduce=group_reduce)
    index = FlatIndex(make_context(config, keys.shape[2], group, [keys.shape[1]]))
    index.build(0, keys, torch.empty(0))
    return index
