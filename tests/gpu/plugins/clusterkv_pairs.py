"""Pairs of ClusterKV indexes with the same clusters, on the CPU and on the GPU, for tests of the selection."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tests.gpu.plugins import gpu_context
from tests.kernels.reference.codes import stores
from torch import Tensor

from kvseek.core.batch import Batch, RequestState
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.device import CudaIndex
from kvseek.plugins.clusterkv.reference import ReferenceIndex

LAYER = 4


make_context = partial(gpu_context.make_context, "clusterkv", layer=LAYER)


def random_keys(n: int, dim: int, dtype: str) -> Tensor:
    """Keys of unequal norms around a common direction, as keys after RoPE are; on the CPU."""
    return gpu_context.keys_of_slots([n], dim, dtype)[0]


def copy_clusters(found: CudaIndex, expected: ReferenceIndex) -> None:
    """Give the index on the GPU the reference's clusters; both have the same extents."""
    for name in ("centroids", "sizes", "starts", "places", "clusters", "spreads"):
        getattr(found, name).copy_(getattr(expected, name))
    if expected.codes is not None and found.codes is not None:
        stores.copy(expected.codes, found.codes)
    found.counts[:] = expected.counts
    found.prompt_tokens[:] = expected.prompt_tokens


def poison(index: ReferenceIndex) -> None:
    index.centroids.fill_(float("nan"))
    index.spreads.fill_(float("nan"))
    if index.codes is not None:
        stores.poison(index.codes)
    for array in (index.sizes, index.starts, index.places):
        array.fill_(-7)
    if isinstance(index, CudaIndex):
        index.workspace.scores.fill_(float("nan"))
        index.workspace.statistics.fill_(float("nan"))
        if index.reranker is not None:
            index.reranker.candidates.fill_(-7)
            index.reranker.estimates.fill_(float("nan"))
            index.reranker.normalisers.fill_(0x77)


def build(index: CudaIndex, slot: int, keys: Tensor) -> None:
    """Give a slot its prompt's keys, on the GPU, and wait for its clusters."""
    work = index.build(slot, keys, keys)
    if work is not None:
        work.wait()


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
