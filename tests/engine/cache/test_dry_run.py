"""Bytes counted without a GPU are those that the classes allocate: on the CPU, layer by layer, and as documented."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from tests.plugins.cases import CASES, ON_GPU
from tests.plugins.clusterkv.settings import OLD_DEFAULTS
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.prkv.settings import BOXES
from torch import Tensor

from kvseek.core.config import CacheConfig, EngineConfig
from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.errors import ConfigError, KernelError
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.core.model_config import ModelConfig
from kvseek.engine.loading.indexes import IndexMaker
from kvseek.engine.loading.memory import (
    ALLOCATION_BYTES,
    HOPPER,
    META,
    DryRun,
    IndexNeeds,
    MetaBytes,
    UnloadedKernels,
    make_without_rows,
)
from kvseek.plugins import registry
from kvseek.plugins.registry import METHODS, get_method

LLAMA = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 1 << 20)
SMALL = ModelConfig("llama", 384, 256, 320, 5, 8, 2, 64, 1e-5, 1e4, 1 << 16)
VARIANTS = [(method, fields) for method in ON_GPU for fields in ({}, *CASES[method].counted)]


def engine(model: ModelConfig, name: str, fields: dict[str, Any], tokens: int = 8192, slots: int = 2) -> EngineConfig:
    method = get_method(name)
    return EngineConfig(
        model,
        name,
        dataclasses.asdict(method.configure(fields)),
        CacheConfig(**method.traits(method.configure(fields)).cache_defaults),
        dtype="bfloat16",
        device="cuda",
        max_batch_size=slots,
        max_input_len=tokens,
        max_seq_len=tokens,
    )


def codebooks(config: EngineConfig) -> dict[str, Tensor]:
    method = get_method(config.method)
    return method.traits(method.configure(config.method_config)).codebooks(config.model.head_dim)


def rounded(size: int) -> int:
    return -(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES


def reachable_storages(root: object) -> dict[int, int]:
    """Bytes by address of what the tensors below an object hold on the CPU, found without knowing what made them."""
    found: dict[int, int] = {}
    seen, waiting = {id(root)}, [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        for other in gc.get_referents(item):
            inside = isinstance(other, (Tensor, dict, list, tuple)) or type(other).__module__.startswith("kvseek.")
            if inside and id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)
    found.pop(0, None)  # tensors without elements
    return found


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_the_cpu_allocates_what_was_counted(name: str, fields: dict[str, Any]) -> None:
    config = engine(SMALL, name, fields)
    books, kernels = codebooks(config), UnloadedKernels(HOPPER)
    kernels.device = torch.device("cpu")
    dense_layers = get_method(name).traits(get_method(name).configure(fields)).device_layers
    for capacity, slots in ((1, 3), (3, 4)):
        made = make_without_rows(IndexMaker(config, books, None, kernels), capacity, slots)
        storages = reachable_storages(made)
        for book in books.values():  # on a GPU each layer that selects has its copy
            assert storages.pop(book.untyped_storage().data_ptr()) == book.nbytes
        copies = max(0, SMALL.num_layers - dense_layers) * sum(rounded(book.nbytes) for book in books.values())
        expected = copies + sum(rounded(size) for size in storages.values())
        assert DryRun(books).index_bytes(config, capacity, slots) == expected > 0


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("name", METHODS)
def test_indexes_of_the_cpu_allocate_what_was_counted(name: str, kernels: str, library: CpuLibrary) -> None:
    """Exactly but for the codebooks, of which layers on a device have copies, and for rounding."""
    config = dataclasses.replace(engine(SMALL, name, {}), device="cpu", kernels=kernels)
    books = codebooks(config)
    for capacity, slots in ((1, 2), (3, 4)):
        extents = ExtentTable(slots, extents_for(config.max_seq_len), capacity)
        maker = IndexMaker(config, books, library if kernels == "native" else None)
        storages = reachable_storages(maker.make(extents, [0] * slots, None))
        found = sum(storages.values())
        spare = SMALL.num_layers * sum(rounded(book.nbytes) for book in books.values()) + 512 * len(storages)
        assert found <= DryRun(books).index_bytes(config, capacity, slots) + 512 <= found + spare + 512


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_counting_a_few_layers_counts_all(name: str, fields: dict[str, Any]) -> None:
    config = engine(LLAMA, name, fields, 1 << 17)
    with MetaBytes() as count:
        made = make_without_rows(IndexMaker(config, codebooks(config), None, UnloadedKernels(HOPPER)), 4, 3)
    assert len(made[0]) == len(made[1]) == 32
    assert DryRun(codebooks(config)).index_bytes(config, 4, 3) == count.used


def needs(name: str, **fields: Any) -> IndexNeeds:
    config = engine(LLAMA, name, fields, 1 << 17)
    return DryRun(codebooks(config)).index_needs(config)


def test_the_documented_figures() -> None:
    """docs/memory.md and the methods' READMEs, by hand: bytes a token, layer and KV head, and what layers share."""
    heads, layers = 8, 32
    assert needs("full").extent == 0
    frame = 2  # of a row: the number of the frame that may hold a copy
    entries, scratch = 1024 * heads * layers * (112 + frame), 1024 * heads * (9 + 4 * 4)
    assert needs("pariskv").extent == entries
    config = engine(LLAMA, "pariskv", {})
    alone = dataclasses.replace(config, cache=dataclasses.replace(config.cache, reuse=False))
    both = [DryRun(codebooks(one)).index_needs(one) for one in (config, alone)]
    assert both[1].extent - both[0].extent == scratch, "of an extent, if no slots share one"
    assert both[0].fixed - both[1].fixed == scratch * extents_for(config.max_seq_len) * config.max_batch_size
    two_bits, four_bits = 128 // 4 + 2, 128 // 2 + 2  # codes of a key, and a scale
    means = 4 * 2 * 128  # of blocks of 256 keys; their steps, 16 bytes, are less than allocations are rounded to
    assert needs("ctkvr").extent == heads * layers * (1024 * (four_bits + frame) + means)
    assert needs("ctkvr", **BY_KEYS).extent == 0, "host cores attend to rows in host memory: no copies either"
    pages, scratch = 1024 // 8, heads * 1024 // 8 * 4 * 4
    assert needs("prkv").extent == heads * layers * (1024 * (two_bits + frame) + means + pages * 4) + scratch
    boxes = pages * (2 * 128 * 2 + 4)
    assert needs("prkv", **BOXES).extent == heads * layers * (boxes + 1024 * frame) + scratch
    clusters = 32  # of 40 keys, a multiple of 16
    whole = 4 * 1024 + clusters * (2 * 128 + 2 * 4)
    assert needs("clusterkv", **OLD_DEFAULTS).extent == heads * (layers - 2) * (whole + 1024 * frame)
    coded = whole + clusters * 4 + 1024 * two_bits
    coded += 1024 // 64 * 2 * 128 + 64  # its evictions are of 320 tokens: blocks of 64
    assert needs("clusterkv").extent == heads * (layers - 2) * (coded + 1024 * frame)
    centroids, lists = 2048 * (32 * (2 * 128 + 4)), heads * 2048 * 1280 * 4
    slot = layers * (centroids + 32 * 128 * 4 + lists)
    hot_row = layers * heads * 2 * (2 * 128 * 2 + 4)  # of this step and the last one
    own = needs("ctkvr").fixed - 2 * 256 * hot_row  # two slots: the padding slot selects no rows
    by_keys = needs("ctkvr", **BY_KEYS, top_k=512).fixed
    for fixed in (own, by_keys):
        assert slot <= fixed / 3 <= 1.01 * slot, "three slots, and a work space that layers share"
    assert 2 * 1024 * hot_row <= needs("prkv").fixed <= 2.2 * 1024 * hot_row
    assert 2 * 512 * hot_row * 30 / 32 <= needs("clusterkv").fixed <= 2.2 * 512 * hot_row * 30 / 32


def test_what_is_freed_is_not_counted() -> None:
    with MetaBytes() as count:
        kept = torch.zeros(700, dtype=torch.uint8, device=META)
        view = kept[5:]
        torch.empty(1 << 20, device=META)
        other = torch.empty(100, device="cpu")
    assert count.used == 1024, "one tensor and its view, in whole blocks"
    del kept
    assert (count.used, other.numel()) == (1024, 100)
    del view
    assert count.used == 0


def test_work_space_follows_the_gpu() -> None:
    config = engine(SMALL, "pariskv", {})
    large = DryRun(codebooks(config)).index_needs(config)
    half = DryRun(codebooks(config), dataclasses.replace(HOPPER, multiprocessors=66)).index_needs(config)
    assert half.extent == large.extent
    assert half.fixed < large.fixed


def test_what_kernels_refuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS, "toy", "tests.plugins.toy_method")
    config = engine(SMALL, "toy", {})
    with pytest.raises(
        ConfigError, match="method = 'toy' does not run with device = 'cuda'; choose one of full, clusterkv"
    ):
        DryRun({}).index_needs(config)
    small = dataclasses.replace(HOPPER, shared_memory_per_block=16 << 10)
    for name in ("ctkvr", "clusterkv"):
        config = engine(SMALL, name, {}, 1 << 16)
        with pytest.raises(KernelError, match="shared memory"):
            DryRun(codebooks(config), small).index_needs(config)


def test_needs_come_from_two_pools() -> None:
    assert IndexNeeds.of(10, 13) == IndexNeeds(3, 7)
    assert IndexNeeds.of(10, 25) == IndexNeeds(15, 0), "rounding never makes it negative"
