"""The nested method's compiled kernels against its PyTorch reference: the rows they choose from the same codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.reference.codes import stores
from tests.plugins.index_cases import KV_HEADS, NativePair, check_near, select_rows
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.kernels.reference.codes.key_codes import estimate_at
from kvseek.plugins.nested import method
from kvseek.plugins.nested.config import Config
from kvseek.plugins.nested.native import NativeIndex
from kvseek.plugins.nested.reference import ReferenceIndex
from kvseek.plugins.ranking import softmax_mean


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
