"""How device and host memory are divided, what of the host's is available, and the pool that lies in it."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvseek.core.config import EXTENT_TOKENS, CacheConfig, EngineConfig
from kvseek.core.errors import CapacityError
from kvseek.core.extents import cut
from kvseek.core.model_config import ModelConfig
from kvseek.engine.cache import row_storage
from kvseek.engine.cache.host_memory import available_bytes
from kvseek.engine.cache.memory_layout import (
    MemoryLayout,
    RowLayout,
    divide_memory,
    lay_out_rows,
    layer_extent_bytes,
    window_bytes,
)
from kvseek.engine.cache.row_storage import HostPool, RowForm, RowStorage
from kvseek.kernels.reference.attention.rounded_rows import round_rows, widen_rows

MODEL = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, 1 << 20)
LAYER_EXTENT = 8 * 1024 * 2 * 128 * 2  # 4 MiB
GIB = 1 << 30


def config(offload: str = "auto", host: int | None = None, device: int | None = None, slots: int = 2) -> EngineConfig:
    cache = CacheConfig(offload=offload, kv_cache_host_memory_bytes=host, kv_cache_device_memory_bytes=device)
    tokens = 128 * 1024
    return EngineConfig(
        MODEL, "full", cache=cache, dtype="bfloat16", device="cuda", max_batch_size=slots, max_seq_len=tokens
    )


def rows(*arguments: object, budget: int | None, **fields: object) -> tuple[int, int, int]:
    plan = lay_out_rows(config(*arguments, **fields), torch.bfloat16, budget)  # type: ignore[arg-type]
    assert plan.layer_bytes == LAYER_EXTENT
    assert plan.host_layers + plan.device_layers == 32
    assert plan.device_bytes == plan.capacity * plan.device_layers * LAYER_EXTENT
    assert plan.host_bytes == plan.capacity * plan.host_layers * LAYER_EXTENT
    return plan.capacity, plan.device_layers, plan.host_layers


def test_the_policies() -> None:
    assert rows("always", budget=100 * GIB) == (256, 0, 32)
    assert rows("never", budget=32 * GIB) == (256, 32, 0)
    assert rows("auto", budget=32 * GIB) == (256, 32, 0), "256 extents of 128 MiB: all layers fit"
    assert rows("auto", budget=32 * GIB - 1) == (256, 31, 1)
    assert rows("auto", budget=GIB - 1) == (256, 0, 32), "less than one layer"
    assert rows("auto", budget=None) == (256, 32, 0)
    assert rows("auto", budget=None, device=5 * GIB) == (256, 5, 27)


def test_layers_that_attend_densely_keep_their_rows_on_the_device() -> None:
    def layers(offload: str, dense: int, budget: int | None) -> tuple[int, int]:
        own = dataclasses.replace(config(offload), method="clusterkv", method_config={"dense_layers": dense})
        made = lay_out_rows(own, torch.bfloat16, budget)
        return made.capacity, made.device_layers

    assert layers("always", 2, None) == (256, 2)
    assert layers("always", 2, 2 * GIB) == (256, 2)
    assert layers("always", 40, None) == (256, 32)
    assert layers("auto", 2, 5 * GIB) == (256, 5)
    assert layers("auto", 2, GIB) == (128, 2), "fewer tokens, not dense reads over PCIe"
    with pytest.raises(
        CapacityError, match=r"'always' needs 2,147,483,648 bytes of rows on the device, 1,000 are free"
    ):
        layers("always", 2, 1000)


def test_host_and_device_budgets_add_up() -> None:
    assert rows("always", budget=None, host=16 * GIB) == (128, 0, 32)
    assert rows("auto", budget=16 * GIB, host=16 * GIB) == (256, 16, 16)
    assert rows("auto", budget=8 * GIB, host=16 * GIB)[0] == 186, "11 and 21 layers: 186 extents; 24 GiB would hold 192"
    assert rows("auto", budget=64 * GIB, host=1) == (256, 32, 0), "no host memory is needed"
    assert rows("never", budget=None, device=16 * GIB, host=1) == (128, 32, 0)


def test_what_cannot_be_held_is_refused_with_numbers() -> None:
    with pytest.raises(
        CapacityError, match=r"'never' needs 34,359,738,368 bytes of rows on the device, 1,000 are free"
    ):
        rows("never", budget=1000)
    with pytest.raises(
        CapacityError,
        match=r"^cache\.kv_cache_host_memory_bytes = 134,217,727: the rows of one extent of 1024 tokens take 134,217,728 bytes "
        r"in 32 layers; raise cache\.kv_cache_host_memory_bytes$",
    ):
        rows("always", budget=None, host=128 * (1 << 20) - 1)


def plan(offload: str = "auto", device_gib: float = 80, index: float = 900.0, **fields: int) -> MemoryLayout:
    sizes = {"weight_bytes": 16 * GIB, "work_bytes": 2 * GIB, "index_bytes_per_token": index}
    device_bytes = int(device_gib * GIB)
    return divide_memory(config(offload, **fields), torch.bfloat16, device_bytes=device_bytes, **sizes)  # type: ignore[arg-type]


def test_device_memory_is_divided() -> None:
    everything = plan()
    assert everything.rows.device_layers == 32
    assert everything.index_bytes == 256 * 1024 * 32 * 900
    assert everything.window_bytes == 32 * 3 * 8 * 576 * 2 * 128 * 2 == window_bytes(config(), torch.bfloat16)
    part = plan(device_gib=40)
    free = 40 * GIB - 18 * GIB - part.window_bytes - part.index_bytes
    assert part.rows.device_layers == free // GIB == 14
    assert part.device_bytes <= 40 * GIB < part.device_bytes + GIB
    assert plan("always", device_gib=26).rows.host_layers == 32


def test_what_does_not_fit_on_the_device_is_refused_with_numbers() -> None:
    pattern = (
        r"weights 17,179,869,184, windows and states 226,492,416, work space 2,147,483,648, index of 262,144 tokens "
        r"7,549,747,200 and rows 0 are 27,103,592,448 bytes, 26,843,545,600 are available; lower max_batch_size"
    )
    for offload in ("auto", "always"):
        with pytest.raises(CapacityError, match=pattern):
            plan(offload, device_gib=25)
    with pytest.raises(CapacityError, match=r"rows 34,359,738,368 are .* available; choose offload 'auto', or lower"):
        plan("never", device_gib=40)
    with pytest.raises(CapacityError, match="are available"):
        plan(device_gib=1)


@settings(deadline=None, max_examples=200)
@given(
    offload=st.sampled_from(["auto", "always", "never"]),
    device_gib=st.floats(1, 160),
    index=st.sampled_from([0.0, 896.0, 4096.0]),
    host=st.none() | st.integers(1, 120 * GIB),
    device=st.none() | st.integers(1, 120 * GIB),
    slots=st.integers(1, 8),
)
def test_a_plan_keeps_all_limits(
    offload: str, device_gib: float, index: float, host: int | None, device: int | None, slots: int
) -> None:
    fields = {"host": host, "device": None if offload == "always" else device, "slots": slots}
    try:
        made = plan(offload, device_gib, index, **fields)  # type: ignore[arg-type]
    except CapacityError:
        return
    assert made.device_bytes <= int(device_gib * GIB)
    assert 0 < made.rows.capacity <= slots * 128
    assert host is None or made.rows.host_bytes <= host
    assert device is None or offload == "always" or made.rows.device_bytes <= device
    own = config(offload, **fields)  # type: ignore[arg-type]
    assert lay_out_rows(own, torch.bfloat16, made.device_row_bytes) == made.rows, "what loading will do"
    if made.rows.device_layers < 32 and offload == "auto" and host is None and device is None:
        more = dataclasses.replace(made.rows, device_layers=made.rows.device_layers + 1)
        assert made.device_bytes - made.rows.device_bytes + more.device_bytes > int(device_gib * GIB), (
            "no layer more fits"
        )


SYSTEM = 8_000_000 * 1024
STATISTICS = "anon 5\nactive_file 40000\ninactive_file 10000\n"
FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
MOUNTS = {1: "sys/fs/cgroup/memory", 2: "sys/fs/cgroup"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with 8 GB available, whose process is in group /job/step of either version."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemFree: 5 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/other\n4:memory:/job/step\n0::/job/step\n")
    return tmp_path


def limit(root: Path, version: int, group: str, most: str, used: int, statistics: str = STATISTICS) -> None:
    folder = root / MOUNTS[version] / group
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(FILES[version], (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(statistics)


def test_no_limit(root: Path) -> None:
    assert available_bytes(root) == SYSTEM
    limit(root, 2, "job/step", "max", 700_000)
    limit(root, 1, "job/step", str(0x7FFFFFFFFFFFF000), 700_000)
    assert available_bytes(root) == SYSTEM
    (root / "proc/self/cgroup").unlink()
    limit(root, 2, "job/step", "1000000", 700_000)
    assert available_bytes(root) == SYSTEM, "a kernel without control groups"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group", ["job/step", "job", ""])
def test_the_limit_of_a_group_or_of_one_above_it(root: Path, version: int, group: str) -> None:
    limit(root, version, group, "1000000", 700_000)
    assert available_bytes(root) == 1_000_000 - 700_000 + 50_000, "cached files can be dropped"
    limit(root, version, group, "1000000", 1_200_000)
    assert available_bytes(root) == 0


def test_the_tightest_group_counts(root: Path) -> None:
    limit(root, 2, "job/step", "9000000", 0)
    limit(root, 2, "job", "3000000", 0)
    limit(root, 2, "other", "1", 0)
    limit(root, 1, "other", "1", 0)  # a group of another controller
    assert available_bytes(root) == 3_050_000


def test_version_1_counts_descendants_apart(root: Path) -> None:
    statistics = "active_file 1\ninactive_file 2\ntotal_active_file 30000\ntotal_inactive_file 4000\n"
    limit(root, 1, "job", "1000000", 700_000, statistics)
    assert available_bytes(root) == 334_000


def test_this_machine() -> None:
    assert available_bytes() > 1 << 20


CPU = torch.device("cpu")


@pytest.mark.parametrize(("layers", "kv_heads"), [(1, 1), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_rows_arrive_where_kernels_look(layers: int, kv_heads: int, dtype: torch.dtype) -> None:
    pool = HostPool(RowForm(kv_heads, 8, dtype, dtype is torch.int8), 4, 3, CPU)
    everything = [torch.randn(layers, kv_heads, 40, *plane.shape[4:]).to(plane.dtype) for plane in pool.planes]
    for plane in pool.planes:
        plane.zero_()
    pool.write(1, 4 - layers, slice(1000, 1024), [part[:, :, 7:31] for part in everything])
    head, position = kv_heads - 1, 1010
    block = EXTENT_TOKENS * sum(plane[0, 0, 0, 0].nbytes for plane in pool.planes)
    start = ((3 * 3 + 1) * kv_heads + head) * block
    for plane, part in zip(pool.planes, everything, strict=True):
        expected = torch.zeros_like(plane)
        expected[1, 4 - layers :, :, 1000:1024] = part[:, :, 7:31]
        assert torch.equal(plane, expected)
        size = part[0, 0, 0].nbytes
        row = (ctypes.c_byte * size).from_address(pool.device_pointer + start + position * size)
        assert torch.equal(torch.frombuffer(row, dtype=plane.dtype).view(part.shape[3:]), part[-1, -1, 17])
        start += EXTENT_TOKENS * size  # scales lie behind the rows of an extent and KV head


def test_rounded_rows_are_read_from_any_layer_as_they_were_written() -> None:
    """Of layers on the device and of the pool, which take the bytes that the layout counts."""
    cache = CacheConfig(row_dtype="int8")
    model = dataclasses.replace(MODEL, num_layers=3, num_kv_heads=2, head_dim=40)
    own = EngineConfig(model, "full", cache=cache, max_batch_size=1, max_seq_len=4096, max_input_len=4096)
    layout = RowLayout(4, 1, 2, layer_extent_bytes(own, torch.bfloat16))
    rows = RowStorage(own, torch.bfloat16, CPU, layout)
    assert rows.pool.blocks.nbytes == layout.host_bytes
    assert sum(plane.numel() * plane.element_size() for plane in rows.device_planes) == layout.device_bytes
    written = torch.randn(3, 2, 2 * EXTENT_TOKENS, 2, 40).bfloat16()
    rows.write(0, written, cut((3, 1), 0, 2 * EXTENT_TOKENS))
    for layer in range(3):
        expected = widen_rows(*round_rows(written[layer]), dtype=torch.bfloat16)
        assert torch.equal(torch.cat(list(rows.blocks(layer, [3, 1])), dim=1), expected)


def test_memory_that_the_system_needs_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * EXTENT_TOKENS * 2 * 4 * 4
    monkeypatch.setattr(row_storage, "available_bytes", lambda: size + row_storage.PINNED_RESERVE_BYTES - 1)
    with pytest.raises(CapacityError, match=r"needs 65,536 bytes of host memory, 1,073,807,359 are available"):
        HostPool(RowForm(1, 4, torch.float32, False), 1, 2, torch.device("cuda", 0))


@pytest.mark.parametrize(("shape", "dtype"), [((1, 1, 4, 2, 4), torch.float32), ((1, 1, 3, 2, 4), torch.bfloat16)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = HostPool(RowForm(1, 4, torch.float32, False), 1, 1, CPU)
    with pytest.raises(ValueError, match=r"must be \(1, 1, 3, 2, 4\) torch.float32"):
        pool.write(0, 0, slice(0, 3), [torch.ones(shape, dtype=dtype)])


@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 0)], ids=str)
def test_a_pool_of_no_layers_takes_no_memory(device: torch.device) -> None:
    for rounded in (False, True):
        pool = HostPool(RowForm(2, 4, torch.float32, rounded), 0, 5, device)
        assert pool.rows.shape == (5, 0, 2, EXTENT_TOKENS, 2, 4)


def test_too_much_pageable_memory_is_refused() -> None:
    with pytest.raises(CapacityError, match="needs 288,230,376,151,711,744 bytes of host memory"):
        HostPool(RowForm(8, 128, torch.bfloat16, False), 1 << 6, 1 << 30, CPU)
