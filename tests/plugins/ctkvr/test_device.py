"""What of CTkvr's index for the GPU can be checked without one: work space, limits, costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.index_cases import context_of

from kvseek.core.batch import BUCKETS, most_requests
from kvseek.core.config import ModelConfig
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import IndexContext
from kvseek.plugins.ctkvr import device
from kvseek.plugins.ctkvr.config import Config
from kvseek.plugins.ctkvr.measurements import costs
from kvseek.plugins.ctkvr.reference import ReferenceIndex
from kvseek.plugins.ctkvr.workspace import LARGEST_KEYS, Workspace
from kvseek.plugins.measurements import SelectionCosts

LLAMA = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 1 << 20)
FEW = Config(centroids=8, probes=8, **BY_KEYS)


def make_context(config: Config, slots: int, tokens: int) -> IndexContext:
    table = ExtentTable(slots, -(-tokens // 1024), 1)
    return context_of(config, 32, 3, table, [0] * slots)


@pytest.mark.parametrize(
    ("slots", "most"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 8), (9, 9), (10, 12), (17, 17), (18, 24)], ids=str
)
def test_the_work_space_holds_every_batch_and_its_padding(slots: int, most: int) -> None:
    assert most_requests(slots) == most
    max_batch = slots - 1  # of an engine: one slot is for padding
    assert next(size for size in BUCKETS if size >= max_batch) <= most
    space = Workspace(make_context(FEW, slots, 4096), 4, 100)
    assert space.recalled.shape == (most, 2, 100)
    assert space.statistics.shape == (most, 2, 7, 3, 2)
    space.require(most)
    with pytest.raises(KernelError, match=rf"batch = {most + 1}: must be at most {most}.*raise max_batch_size"):
        space.require(most + 1)


def test_keys_that_shared_memory_does_not_hold_get_memory_of_their_own() -> None:
    context = make_context(FEW, 2, 4096)
    most = LARGEST_KEYS // 4
    small, large = Workspace(context, 4, most), Workspace(context, 4, most + 1)
    assert (small.keys, small.shared_key_bytes) == (None, LARGEST_KEYS)
    assert large.keys.shape == (2, 2, 2, most + 1)
    assert large.shared_key_bytes == 0


def test_regions_that_shared_memory_has_no_bits_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(multiprocessors=132, shared_memory_per_block=99 << 10)
    monkeypatch.setattr(device, "ReferenceIndex", lambda context: ReferenceIndex(replace(context, cuda=None)))
    most = ((99 - 9) << 10) // (4 + 128) * 1024
    context = make_context(replace(FEW, top_k=8, recent=8), 1, most + 1)
    limit = rf"regions of up to {most + 1024} tokens .* must be at most {most} tokens,.*; lower max_seq_len"
    with pytest.raises(KernelError, match=limit):
        device.CudaIndex(replace(context, cuda=kernels))  # type: ignore[arg-type]


@pytest.mark.parametrize(("execution", "expected"), [("cpu", {}), ("codes", {"CTKVR_CODE_BITS": 4})])
def test_codes_are_a_macro_of_the_kernels(execution: str, expected: dict[str, int]) -> None:
    config = Config(execution=execution)
    assert device.cuda_macros(config, 128, 4) == expected
    if expected:
        with pytest.raises(ConfigError, match=r"head_dim = 32: must be a multiple of 32 from 64 to 256 with execution"):
            device.cuda_macros(config, 32, 4)


def test_costs_of_a_step() -> None:
    config = Config(execution="cpu")
    assert costs(config, LLAMA, 256, 2) == SelectionCosts(rows=256)
    found = costs(config, LLAMA, 131072, 2)
    assert found.rows == 256
    assert found.index_bytes * LLAMA.num_kv_heads == 2048 * 32 * (128 * 2 + 4), "the centroids of all query heads"
    assert found.reranked_keys == 16 * 1280 / 2
    assert found.rerank_bytes == 16 * 1280 * 4
    assert found.host_cores
    coded = costs(Config(), LLAMA, 131072, 2)
    assert coded.rerank_bytes == 16 * 1280 * 4 + 16 * 1280 / 2 * 66
    rest = {"host_cores": False, "rerank_bytes": coded.rerank_bytes, "reranked_keys": 0}
    assert coded == replace(found, **rest), "no key is read from the pool"
    short = costs(config, LLAMA, 600, 2)
    assert short.index_bytes == 38 * 4 * (128 * 2 + 4), "a centroid for 16 tokens"
    assert short.reranked_keys == 600
