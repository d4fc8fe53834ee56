"""What of the index for the GPU can be checked without one: its work space, and the bins of its keys."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from tests.plugins.index_cases import KV_HEADS, context_of

import kvseek.kernels
from kvseek.core.batch import REQUEST_FIELDS, Batch
from kvseek.core.errors import KernelError
from kvseek.core.extents import ExtentTable
from kvseek.engine.loading.memory import HOPPER, META, UnloadedKernels
from kvseek.kernels.arguments import POWER_SUM_BYTES
from kvseek.kernels.reference.codes.rotation import padded_dim, rotation_signs
from kvseek.plugins.nested.config import Config
from kvseek.plugins.nested.device import BINS, CudaIndex

GROUP, DIM = 4, 128


def make_index(slots: int, config: Config) -> CudaIndex:
    extents = ExtentTable(slots, 4, 4, META)
    books = {"signs": rotation_signs(0, padded_dim(DIM)).to(META)}
    context = context_of(
        config, DIM, GROUP, extents, [0] * slots, codebooks=books, device=META, cuda=UnloadedKernels(HOPPER)
    )
    return CudaIndex(context)


@pytest.mark.parametrize("slots", [1, 3, 65])
def test_every_batch_has_room_for_its_lists(slots: int) -> None:
    space = make_index(slots, Config(top_k=50)).workspace
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
    index = make_index(3, Config())
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
