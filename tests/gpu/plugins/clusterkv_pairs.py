"""Pairs of ClusterKV indexes with the same clusters, on the CPU and on the GPU, for tests of the selection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvseek.builder.compile.cuda import Specialisation, cached_cubin
from kvseek.core.cuda import CudaKernels
from kvseek.core.extents import ExtentTable
from kvseek.plugins.batch import Batch, RequestState
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import CudaIndex
from kvseek.plugins.clusterkv.method import traits
from kvseek.plugins.clusterkv.reference import ReferenceIndex
from kvseek.plugins.contract import IndexContext

KV_HEADS = 2
LAYER = 4


def load_kernels(dtype: str, dim: int, group: int, config: Config) -> CudaKernels:
    major, minor = torch.cuda.get_device_capability()
    macros = tuple(sorted(traits(config).cuda_macros(dim, group).items()))
    return CudaKernels(cached_cubin(Specialisation(dtype, dim, group, "clusterkv", macros), 10 * major + minor))


def make_context(
    config: Config,
    dtype: str,
    dim: int,
    group: int,
    lengths: Sequence[int],
    device: str,
    room: int = 0,
    layer: int = LAYER,
) -> IndexContext:
    """Slots in reverse order take extents from both ends of the pool, so tables are anything but the identity."""
    extents = [-(-(length + room) // 1024) for length in lengths]
    table = ExtentTable(len(lengths), max(1, *extents), sum(extents) + 3, torch.device(device))
    for slot in reversed(range(len(lengths))):
        table.reserve(slot, lengths[slot] + room)
    return IndexContext(
        layer=layer,
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        scaling=dim**-0.5,
        config=config,
        codebooks={},
        extents=table,
        lengths=list(lengths),
        dtype=getattr(torch, dtype),
        device=torch.device(device),
        cuda=load_kernels(dtype, dim, group, config) if device == "cuda" else None,
    )


def random_keys(n: int, dim: int, dtype: str) -> Tensor:
    """Keys of unequal norms around a common direction, as keys after RoPE are; on the CPU."""
    center = torch.randn(KV_HEADS, 1, dim)
    keys = (torch.randn(KV_HEADS, n, dim) + center) * (0.5 + torch.rand(KV_HEADS, n, 1))
    return keys.to(getattr(torch, dtype))


def copy_clusters(found: CudaIndex, expected: ReferenceIndex) -> None:
    """Give the index on the GPU the reference's clusters; both have the same extents."""
    for name in ("centroids", "sizes", "starts", "places", "clusters"):
        getattr(found.reference, name).copy_(getattr(expected, name))
    found.reference.counts[:] = expected.counts
    found.reference.prompt_tokens[:] = expected.prompt_tokens


def poison(index: CudaIndex | ReferenceIndex) -> None:
    arrays = index.reference if isinstance(index, CudaIndex) else index
    arrays.centroids.fill_(float("nan"))
    for array in (arrays.sizes, arrays.starts, arrays.places):
        array.fill_(-7)
    if isinstance(index, CudaIndex):
        index.workspace.scores.fill_(float("nan"))
        index.workspace.statistics.fill_(float("nan"))


def build(index: CudaIndex, slot: int, keys: Tensor) -> None:
    """Give a slot its prompt's keys, on the GPU, and wait for its clusters."""
    built = index.build(slot, keys, keys)
    assert built.order is None
    if built.ticket is not None:
        built.ticket.wait()


def make_pair(
    config: Config, dtype: str, dim: int, group: int, lengths: Sequence[int]
) -> tuple[ReferenceIndex, CudaIndex]:
    """The same clusters, found by the reference, in it on the CPU and in the index on the GPU; all else is poisoned."""
    expected = ReferenceIndex(make_context(config, dtype, dim, group, lengths, "cpu"))
    found = CudaIndex(make_context(config, dtype, dim, group, lengths, "cuda"))
    poison(expected)
    poison(found)
    for slot, length in enumerate(lengths):
        keys = random_keys(length, dim, dtype)
        expected.build(slot, keys, keys)
    copy_clusters(found, expected)
    return expected, found


def batch_of(index: CudaIndex, positions: Sequence[int], slots: Sequence[int], dense: Sequence[int] = ()) -> Batch:
    lengths = index.context.lengths
    states = [
        RequestState(slot=slot, position=position, length=lengths[slot], dense=slot in dense)
        for slot, position in zip(slots, positions, strict=True)
    ]
    return Batch.of(states, index.context.extents.device_table)
