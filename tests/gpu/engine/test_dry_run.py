"""What `kvseek build --plan` counts on the meta device is what loading measures on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.plugins.cases import ON_GPU
from tests.plugins.ctkvr.settings import BY_KEYS
from tests.plugins.prkv.settings import BOXES

from kvseek.bench.methods import load_kernels
from kvseek.core.config import CacheConfig, EngineConfig
from kvseek.core.model_config import ModelConfig
from kvseek.engine.loading.indexes import IndexMaker
from kvseek.engine.loading.memory import DryRun, GpuTraits, measured_bytes
from kvseek.engine.loading.supported import needs_cpu_library
from kvseek.plugins.registry import get_method

pytestmark = pytest.mark.gpu

MODEL = ModelConfig("llama", 384, 512, 640, 4, 8, 2, 128, 1e-5, 1e4, 1 << 18)
TOKENS = 1 << 17
PAPERS = [("ctkvr", BY_KEYS), ("prkv", BOXES)]
# A block of PyTorch's allocator may be larger than what was asked for, by what it does not split off.
SPARE_BYTES = 2 << 20
KEPT_BYTES = 64 << 10  # of constants that methods keep on a device once made


@pytest.mark.parametrize(("name", "fields"), [*((name, {}) for name in ON_GPU), *PAPERS])
def test_counted_bytes_are_measured_bytes(name: str, fields: dict[str, Any]) -> None:
    from kvseek.builder.compile.cpu import cached_cpu_library
    from kvseek.builder.compile.cuda import specialise
    from kvseek.core.cpu_library import CpuLibrary

    method = get_method(name)
    settings = method.configure(fields)
    own = method.traits(settings)
    config = EngineConfig(
        MODEL,
        name,
        dataclasses.asdict(settings),
        CacheConfig(**own.cache_defaults),
        dtype="bfloat16",
        device="cuda",
        max_batch_size=3,
        max_input_len=TOKENS,
        max_seq_len=TOKENS,
    )
    kernels = load_kernels(specialise(config))
    library = CpuLibrary(cached_cpu_library()) if needs_cpu_library(config) else None
    books = own.codebooks(MODEL.head_dim)
    traits = GpuTraits("this", kernels.capability, kernels.multiprocessors, kernels.shared_memory_per_block)
    dry = DryRun(books, traits)
    maker = IndexMaker(config, books, library, kernels)
    for capacity in (1, 64):
        measured = measured_bytes(maker, capacity)
        counted = dry.index_bytes(config, capacity, config.max_batch_size + 1)
        assert counted - KEPT_BYTES <= measured <= counted * 1.02 + SPARE_BYTES
