"""ParisKV's compiled kernels against its PyTorch reference: the index they write, the rows they choose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.index_cases import KV_HEADS, NativePair, check_near, keys_of_slots, select_rows
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import KernelError
from kvseek.plugins.pariskv import codebook, method, reference
from kvseek.plugins.pariskv.config import GROUP_REDUCTIONS, Config, ScheduleStep
from kvseek.plugins.pariskv.native import NativeIndex
from kvseek.plugins.pariskv.reference import ReferenceIndex
from kvseek.plugins.ranking import best_positions, softmax_mean


class OwnEntries(NativePair):
    """Both indexes search what they have written themselves."""

    method, kinds = method, (ReferenceIndex, NativeIndex)
    configs = tuple(  # a rerank; and as many candidates as rows, so that the choice is the votes' alone
        Config(top_k=100, group_reduce=reduce, schedule_steps=(ScheduleStep(None, 0.3, beta),))
        for beta in (0.25, 1e-9)
        for reduce in sorted(GROUP_REDUCTIONS, reverse=True)
    )

    def fill(self, keys: Sequence[Tensor]) -> None:
        self.found.ids.fill_(255)
        self.found.codes.fill_(255)
        self.found.weights.fill_(float("nan"))
        self.found.counts.fill_(-7)
        for slot, part in enumerate(keys):
            self.expected.build(slot, part, part)
            self.found.build(slot, part, part)

    def check_choice(self, ours: Tensor, theirs: Tensor, queries: Tensor, slot: int) -> None:
        values = values_of(self.expected, queries.unflatten(0, (KV_HEADS, -1)), slot)
        for head in range(KV_HEADS):
            assert ours[head].tolist() == sorted(ours[head].tolist())
            check_near(ours[head].tolist(), theirs[head].tolist(), dict(enumerate(values[head].tolist())))


class Pair(OwnEntries):
    """Both search the reference's."""

    def fill(self, keys: Sequence[Tensor]) -> None:
        super().fill(keys)
        for slot, part in enumerate(keys):
            for name in ("ids", "codes", "weights"):
                rows = self.expected.context.extents.read(getattr(self.expected, name), slot, part.shape[1])
                self.found.context.extents.write(getattr(self.found, name), slot, 0, rows)


def check_index(expected: ReferenceIndex, found: NativeIndex) -> None:
    assert torch.equal(found.counts, expected.counts)
    for slot, n in enumerate(expected.context.lengths):
        ids, codes, weights = (
            [index.context.extents.read(getattr(index, name), slot, n) for index in (expected, found)]
            for name in ("ids", "codes", "weights")
        )
        assert torch.equal(ids[1], ids[0])
        nibbles = [codebook.unpack_nibbles(part).int() for part in codes]
        assert torch.equal(nibbles[1] & 8, nibbles[0] & 8)
        steps = ((nibbles[1] & 7) - (nibbles[0] & 7)).abs()
        assert not bool((steps > 1).any())
        assert int((steps > 0).sum()) <= max(1, steps.numel() // 10_000)  # a magnitude within rounding of a threshold
        torch.testing.assert_close(weights[1], weights[0], rtol=2e-3, atol=1e-7)


def values_of(index: ReferenceIndex, queries: Tensor, slot: int) -> Tensor:
    """What the rerank ranks: [G, n], -inf for keys that are no candidates. queries [G, g, D]."""
    config, n, extents = index.config, index.context.lengths[slot], index.context.extents
    rho, beta = config.schedule(n)
    lanes = index.lanes(queries)
    tiers = reference.tier_table(lanes, index.counts[slot], math.ceil(rho * n))
    votes = reference.collision_scores(tiers, extents.read(index.ids, slot, n))
    candidates = best_positions(votes, min(n, max(config.top_k, math.ceil(beta * n))))
    codes = reference.take_rows(extents.read(index.codes, slot, n), candidates)
    weights = reference.take_rows(extents.read(index.weights, slot, n), candidates)
    estimates = reference.estimate_scores(lanes, codes, weights, index.levels)
    of_mean = config.group_reduce == "mean"
    values = estimates[:, 0] if of_mean else softmax_mean(estimates, index.context.scaling)
    return torch.full((len(queries), n), -math.inf).scatter(1, candidates, values)


@pytest.mark.parametrize("dim", [8, 20, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_encoding_equals_the_reference(library: CpuLibrary, level: int, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    keys = keys_of_slots([1500, 0, 1], dim, dtype)
    keys[0][:, 7] = 0  # a key without a direction
    keys[0][:, 8] *= 1e6  # and one whose weights float16 cannot hold
    pair = OwnEntries(library, Config(), 1, dim, keys)
    check_index(pair.expected, pair.found)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 400),
    top_k=st.integers(1, 60),
    group=st.integers(1, 9),
    rho=st.floats(0.001, 1),
    seed=st.integers(0, 2**31),
)
def test_ties_are_cut_as_the_reference_cuts_them(
    library: CpuLibrary, n: int, top_k: int, group: int, rho: float, seed: int
) -> None:
    """Sparse small integers: equal centroid scores, equal votes, whole blocks of zeros."""
    torch.manual_seed(seed)
    config = Config(top_k=top_k, schedule_steps=(ScheduleStep(None, rho, 1e-9),))
    keys = [torch.randint(-1, 2, (KV_HEADS, n, 64)).float()]
    pair = Pair(library, config, group, 64, keys)
    queries = torch.randint(-1, 2, (1, KV_HEADS * group, 64)).float() * (torch.rand(1, 1, 64) < 0.1)
    rows = [select_rows(index, queries, [0]).rows for index in (pair.found, pair.expected)]
    assert torch.equal(*rows)


def test_unsupported_shapes_are_refused(library: CpuLibrary) -> None:
    with pytest.raises(KernelError, match=r"num_heads / num_kv_heads = 17: must be at most 16; .*--kernels reference"):
        NativeIndex(Pair.context(library, Config(), 17, 64, [10]))
    with pytest.raises(KernelError, match="head_dim = 264"):
        NativeIndex(Pair.context(library, Config(), 1, 264, [10]))
