"""ClusterKV's compiled kernel against the PyTorch reference: the rows it chooses from the same clusters and codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import KV_HEADS, NativePair, check_near, extend, keys_of_slots, select_rows
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.kernels.reference.codes.key_codes import estimate_at, round_lanes
from kvseek.kernels.reference.codes.rotation import rotate
from kvseek.kernels.reference.codes.store import CodeStore
from kvseek.plugins.clusterkv import method
from kvseek.plugins.clusterkv.config import Config
from kvseek.plugins.clusterkv.native import NativeIndex
from kvseek.plugins.clusterkv.reference import ReferenceIndex
from kvseek.plugins.ranking import softmax_mean

# The kernel's arrays, each with what fills the entries that nothing has written.
POISON: dict[str, float] = {
    "centroids": float("nan"),
    "sizes": 10**9,
    "starts": 10**9,
    "spreads": float("nan"),
    "places": -(10**9),
}
SPREAD = 3.0


def arrays(index: ReferenceIndex) -> dict[str, Tensor]:
    """What a selection reads beside codes, all of it poisoned or written."""
    return {name: getattr(index, name) for name in (*POISON, "clusters")}


class Pair(NativePair):
    """Clusters and codes are the reference's."""

    method, kinds = method, (ReferenceIndex, NativeIndex)
    configs = (
        Config(top_k=40, candidates=8, spread_weight=SPREAD, iterations=2),
        Config(top_k=40, candidates=3, spread_weight=0.0, iterations=2),
        Config(top_k=100, rerank_bits=0, spread_weight=SPREAD, iterations=2),
        Config(top_k=100, rerank_bits=0, spread_weight=0.0, iterations=2),
        Config(top_k=100, candidates=1, spread_weight=SPREAD, iterations=2),
    )
    few = 3
    ascending = False

    def fill(self, keys: Sequence[Tensor]) -> None:
        expected, found = self.expected, self.found
        for name, value in POISON.items():
            arrays(expected)[name].fill_(value)
        if expected.codes:
            stores.poison(expected.codes)
        for slot, part in enumerate(keys):
            for index in (expected, found):
                index.build(slot, part, part)
        for name, array in arrays(found).items():
            array.copy_(arrays(expected)[name])
        if expected.codes and found.codes:
            stores.copy(expected.codes, found.codes)

    def check_choice(self, ours: Tensor, theirs: Tensor, queries: Tensor, slot: int) -> None:
        """In the same order, too."""
        if self.expected.codes is None:
            assert torch.equal(ours, theirs)
            return
        for head, value_of in enumerate(values_of(self.expected, self.expected.codes, queries, slot)):
            order = {
                place: number for number, place in enumerate(value_of)
            }  # KeyError below: a row of no cluster taken
            assert ours[head].tolist() == sorted(ours[head].tolist(), key=lambda place: order[place])
            check_near(ours[head].tolist(), theirs[head].tolist(), value_of)


def values_of(index: ReferenceIndex, codes: CodeStore, queries: Tensor, slot: int) -> list[dict[int, float]]:
    """For each KV head what the rows of the best clusters are ranked by: queries [H, D] to value by place."""
    n, config = index.context.lengths[slot], index.config
    grouped = queries.unflatten(0, (KV_HEADS, -1))
    places = index.candidates(grouped, slot, n)[:, : min(n, config.rows_of_clusters)].long()
    lanes = round_lanes(rotate(grouped.float(), codes.signs))
    estimates = estimate_at(codes.read(slot, n), places, lanes)
    values = softmax_mean(estimates, index.context.scaling)
    return [dict(zip(*pair, strict=True)) for pair in zip(places.tolist(), values.tolist(), strict=True)]


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 2000),
    top_k=st.integers(1, 60),
    group=st.integers(1, 9),
    candidates=st.integers(1, 9),
    distinct=st.integers(1, 40),
    per_cluster=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_ties_are_cut_as_the_reference_cuts_them(
    library: CpuLibrary, n: int, top_k: int, group: int, candidates: int, distinct: int, per_cluster: int, seed: int
) -> None:
    """Few distinct keys, so that rows tie and clusters are empty; and no query at all, so that everything ties."""
    torch.manual_seed(seed)
    config = Config(
        top_k=top_k,
        candidates=candidates,
        tokens_per_cluster=per_cluster,
        rerank_bits=2,
        spread_weight=SPREAD,
        iterations=2,
    )
    keys = torch.randn(KV_HEADS, distinct, 64)[:, torch.randint(distinct, (n,)).sort().values]
    pair = Pair(library, config, group, 64, [keys])
    pair.check(torch.randn(1, KV_HEADS * group, 64), [0])
    nothing = torch.zeros(1, KV_HEADS * group, 64)
    if n > top_k and group <= 2:  # PyTorch adds more equal weights in orders that differ by place
        rows = [select_rows(index, nothing, [0]).rows for index in (pair.found, pair.expected)]
        assert torch.equal(*rows)


def test_evictions_are_found(library: CpuLibrary) -> None:
    """Keys that join the last cluster, and clusters of generated tokens across the border of an extent."""
    torch.manual_seed(2)
    config = Config(top_k=40, candidates=4, rerank_bits=2, spread_weight=SPREAD)
    keys = keys_of_slots([1700], 64)[0]
    pair = Pair(library, config, 3, 64, [keys[:, :900]])
    for index in (pair.expected, pair.found):
        index.context.extents.reserve(0, 1700)
        for start, count in ((900, 320), (1220, 5), (1225, 100), (1325, 320), (1645, 55)):
            extend(index, 0, keys[:, start : start + count])
    for name, array in arrays(pair.found).items():
        array.copy_(arrays(pair.expected)[name])  # a code at the border of two cells may differ
    pair.check(torch.randn(1, 3 * KV_HEADS, 64), [0])
