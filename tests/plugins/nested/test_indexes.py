"""The nested method's indexes: the reference against the definition, compiled kernels against the reference, the GPU's bins."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import (
    KV_HEADS,
    NativePair,
    check_definition,
    check_near,
    context_of,
    random_keys,
    random_queries,
    select_rows,
    shared_with_exact,
)
from torch import Tensor

import kvseek.kernels
from kvseek.core.batch import REQUEST_FIELDS, Batch
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.engine.loading.memory import HOPPER, META, UnloadedKernels
from kvseek.kernels.arguments import POWER_SUM_BYTES
from kvseek.kernels.reference.codes.key_codes import STEPS, estimate_at, leading_bits, mean_integers
from kvseek.kernels.reference.codes.rotation import padded_dim, rotate, rotation_signs
from kvseek.plugins.nested import method
from kvseek.plugins.nested.config import Config
from kvseek.plugins.nested.device import BINS, CudaIndex
from kvseek.plugins.nested.native import NativeIndex
from kvseek.plugins.nested.reference import ReferenceIndex
from kvseek.plugins.ranking import softmax_mean


def make_index(config: Config, head_dim: int, group: int, keys: Tensor, room: int = 0) -> ReferenceIndex:
    n = keys.shape[1]
    table = ExtentTable(1, extents_for(n + room), extents_for(n + room))
    table.reserve(0, n + room)
    books = {"signs": rotation_signs(config.rotation_seed, padded_dim(head_dim))}
    index = ReferenceIndex(context_of(config, head_dim, group, table, [n], codebooks=books))
    index.build(0, keys, torch.empty(0))
    return index


def select_by_hand(index: ReferenceIndex, query: Tensor, head: int) -> list[int]:
    """Both passes for the queries [g, D] of one KV head (plugins/nested/README.md), in float64."""
    config, n = index.config, index.context.lengths[0]
    codes = index.codes.read(0, n)
    scales = codes.scales[head].double()
    means = mean_integers(codes.means[head]).double() * codes.mean_steps[head].double()[:, None]
    lanes = rotate(query, index.codes.signs)
    lanes = torch.stack([(lane * (127 / lane.abs().max())).round() * lane.abs().max() / 127 for lane in lanes]).double()

    def estimates(bits: int) -> Tensor:
        values = STEPS[4] * 2 ** (4 - bits) * (leading_bits(codes, bits)[head].double() - (2**bits - 1) / 2)
        return lanes @ (values * scales[:, None] + means).T

    scores = ((estimates(2) - lanes @ means[:1].T) / lanes.norm(dim=1, keepdim=True)).max(dim=0).values.tolist()
    places = sorted(sorted(range(n), key=lambda i: (-scores[i], i))[: config.candidates * config.top_k])
    values = (estimates(4)[:, places] * index.context.scaling).softmax(dim=-1).mean(dim=0)
    kept = sorted(range(len(places)), key=lambda i: (-float(values[i]), i))[: config.top_k]
    return sorted(places[i] for i in kept)


@pytest.mark.parametrize(("head_dim", "group", "n"), [(64, 3, 700), (80, 2, 1100), (16, 1, 300)])
def test_selection_equals_the_definition(head_dim: int, group: int, n: int) -> None:
    index = make_index(Config(top_k=23, candidates=4), head_dim, group, random_keys(n, head_dim))
    check_definition(index, select_by_hand, head_dim, group)


def test_a_common_offset_of_all_keys_changes_nothing() -> None:
    """Because the mean is subtracted. The offset is a power of two, so that keys and mean are rounded alike."""
    keys, queries = random_keys(900, 64).round(decimals=2), random_queries(1, KV_HEADS * 3, 64)
    rows = [select_rows(make_index(Config(top_k=20), 64, 3, k), queries, [0]).rows[0] for k in (keys, keys + 64)]
    same = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*rows, strict=True)]
    assert min(same) >= 19  # of 20: rounding may swap keys at the cut


def test_finds_most_of_the_exact_top_k() -> None:
    assert shared_with_exact(lambda keys: make_index(Config(), 64, 2, keys)) > 85


def test_bytes_per_token() -> None:
    for head_dim, expected in ((64, 34 + 132 / 256), (128, 66 + 260 / 256)):
        assert make_index(Config(), head_dim, 1, random_keys(1, head_dim)).bytes_per_token == KV_HEADS * expected


def test_candidates_are_so_many_a_row() -> None:
    assert [Config().candidate_count(n) for n in (0, 350, 800, 100_000)] == [0, 350, 800, 800]


class Pair(NativePair):
    method, kinds = method, (ReferenceIndex, NativeIndex)
    configs = (Config(top_k=40, candidates=5),)

    def fill(self, keys: Sequence[Tensor]) -> None:
        stores.poison(self.found.codes)
        for slot, part in enumerate(keys):
            self.expected.build(slot, part, part)
            stores.copy_slot(self.expected.codes, self.found.codes, slot, part.shape[1])

    def check_choice(self, ours: Tensor, theirs: Tensor, queries: Tensor, slot: int) -> None:
        n = self.expected.context.lengths[slot]
        lanes = self.expected.lanes(queries.unflatten(0, (KV_HEADS, -1)))
        candidates = self.expected.candidates(lanes, slot, n)
        estimates = estimate_at(self.expected.codes.read(slot, n), candidates, lanes)
        values = softmax_mean(estimates, self.expected.context.scaling)
        for head in range(KV_HEADS):
            assert ours[head].tolist() == sorted(ours[head].tolist())
            value_of = dict(zip(candidates[head].tolist(), values[head].tolist(), strict=True))
            check_near(ours[head].tolist(), theirs[head].tolist(), value_of)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 3000),
    top_k=st.integers(1, 60),
    group=st.integers(1, 9),
    candidates=st.integers(1, 9),
    distinct=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_ties_are_cut_as_the_reference_cuts_them(
    library: CpuLibrary, n: int, top_k: int, group: int, candidates: int, distinct: int, seed: int
) -> None:
    """Few distinct keys, in runs, so that every score occurs many times."""
    torch.manual_seed(seed)
    config = Config(top_k=top_k, candidates=candidates)
    keys = torch.randn(KV_HEADS, distinct, 64)[:, torch.randint(distinct, (n,)).sort().values]
    pair = Pair(library, config, group, 64, [keys])
    queries = torch.randn(1, KV_HEADS * group, 64)
    if candidates == 1:  # the choice is the candidates', and no softmax's
        rows = [select_rows(index, queries, [0]).rows for index in (pair.found, pair.expected)]
        assert torch.equal(*rows)
    else:
        pair.check(queries, [0])


GROUP, DIM = 4, 128


def device_index(slots: int, config: Config) -> CudaIndex:
    extents = ExtentTable(slots, 4, 4, META)
    books = {"signs": rotation_signs(0, padded_dim(DIM)).to(META)}
    context = context_of(
        config, DIM, GROUP, extents, [0] * slots, codebooks=books, device=META, cuda=UnloadedKernels(HOPPER)
    )
    return CudaIndex(context)


@pytest.mark.parametrize("slots", [1, 3, 65])
def test_every_batch_has_room_for_its_lists(slots: int) -> None:
    space = device_index(slots, Config(top_k=50)).workspace
    for batch in range(1, space.most + 1):
        scan, choice = space.grids(batch)
        assert batch <= scan
        assert batch <= choice <= min(16 * batch, space.counts.shape[1])
    lists = (KV_HEADS, space.grids(space.most)[1])
    assert space.places.shape == space.keys.shape == (*lists, space.capacity)
    assert space.estimates.shape == (*lists, space.capacity, GROUP)
    assert space.normalisers.shape == (*lists, GROUP, POWER_SUM_BYTES)
    tasks = space.most * KV_HEADS
    assert (space.totals.shape, space.finished.shape) == ((tasks, BINS), (tasks,))


def test_a_batch_beyond_the_slots_is_refused() -> None:
    index = device_index(3, Config())
    batch = Batch(torch.zeros(5, REQUEST_FIELDS, dtype=torch.int32, device=META), index.context.extents.device_table)
    queries = torch.zeros(5, KV_HEADS * GROUP, DIM, device=META)
    with pytest.raises(KernelError, match="batch = 5: must be at most 3, the requests that the slots allow"):
        index.select(queries, batch)


PROBE = """
#include <algorithm>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using std::max, std::min;
constexpr int BINS = 4096;
%s
int main() {  // the bins of -infinity, 0, 2^-56, 1, 16, 2^8, infinity and both kinds of NaN, as ordered_bits gives them
    for (unsigned key : {0x007fffffu, 0x80000000u, 0xa3800000u, 0xbf800000u, 0xc1800000u, 0xc3800000u, 0xff800000u,
                         0xffc00000u, 0xffffffffu, 0u})
        std::printf("%%d ", WeightBits::of(key));
}
"""


def test_every_key_has_a_bin_of_the_histogram(tmp_path: Path) -> None:
    """Weights are NaN if a query is infinite: an access outside of shared memory would end the requests of all."""
    source = (Path(kvseek.kernels.__file__).parent / "cuda/largest.cuh").read_text(encoding="utf-8")
    (struct,) = re.findall(r"^struct WeightBits \{.*?^\};", source, re.DOTALL | re.MULTILINE)
    (tmp_path / "probe.cpp").write_text(PROBE % struct)
    subprocess.run(["g++", "-std=c++17", tmp_path / "probe.cpp", "-o", tmp_path / "probe"], check=True)
    found = subprocess.run([tmp_path / "probe"], check=True, capture_output=True, text=True).stdout
    assert found.split() == [*"000", "3584", "3840", *["4095"] * 4, "0"]
