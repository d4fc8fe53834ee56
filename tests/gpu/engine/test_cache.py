"""The cache on a GPU: copies overlap, nothing waits on the host, and kernels find the rows where they are told to.

Streams are held up by kernels that only wait, so that whatever is not ordered runs in the wrong order.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.gpu.waits import no_host_waits, slow_stream
from tests.support.cache_runs import DIM, KV_HEADS, LAYERS, CacheRun, check_rows, make_config, rows_of
from torch import Tensor

from kvseek.core.config import EXTENT_TOKENS
from kvseek.engine.cache import cache as cache_module
from kvseek.engine.cache.row_storage import HostPool, RowForm

pytestmark = pytest.mark.gpu

SIDE_CYCLES = 50_000_000  # about 25 ms: longer than two decode steps of these tests
STEP_CYCLES = 4_000_000  # about 2 ms: longer than any copy or kernel here takes


def as_kernels_read(run: CacheRun, layer: int) -> Tensor:
    """The layer's rows [extents, G, 1024, 2, D] by pointer and extent stride alone."""
    rows, item = run.cache.rows.of_layer(layer), 4
    shape = (run.cache.rows.layout.capacity, KV_HEADS, EXTENT_TOKENS, 2, DIM)
    inner = (EXTENT_TOKENS * 2 * DIM, 2 * DIM, DIM, 1)
    strides = tuple(stride * item for stride in (rows.extent_stride, *inner))
    described = {"shape": shape, "strides": strides, "typestr": "<f4", "data": (rows.pointer, False)}
    exporter = SimpleNamespace(__cuda_array_interface__={**described, "version": 3})
    return torch.as_tensor(exporter, device=run.device)


@pytest.mark.parametrize("device_layers", [0, 1, LAYERS])
@pytest.mark.parametrize("slow", ["side streams", "current stream"])
def test_every_token_is_held_once_and_in_order(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, device_layers: int, slow: str
) -> None:
    if slow == "side streams":
        monkeypatch.setattr(cache_module, "SideStream", slow_stream(SIDE_CYCLES))
    cycles = STEP_CYCLES if slow == "current stream" else 0
    config = make_config(4, 2, 8, device_layers=device_layers)
    run = CacheRun(config, device, delay=lambda: torch.cuda._sleep(cycles))
    assert run.cache.evict_ahead == 2
    for request, (slot, prompt, steps) in enumerate([(0, 1037, 12), (2, 2050, 9), (0, 30, 30), (1, 1500, 20)]):
        run.close(slot)
        for _ in run.prefill(request, slot, prompt, 3000):
            run.step()
        for _ in range(steps):
            run.step()
        run.check_contents()


def test_a_cancelled_prompt_does_not_reach_the_next_owner_of_its_extents(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "SideStream", slow_stream(SIDE_CYCLES))
    run = CacheRun(make_config(4, 8, 8, offload="always"), device)
    next(run.prefill(1, 0, 1500, 1500))  # layer 0 is on its way to the host
    run.close(0)
    for _ in run.prefill(2, 1, 1500, 1500):  # gets the extents that were given back
        pass
    run.check_contents()


def test_the_host_never_waits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SideStream", slow_stream(SIDE_CYCLES))
    run = CacheRun(make_config(4, 12, 8, device_layers=1), device)
    cache, indexes = run.cache, run.indexes
    keys = rows_of(0, 0, torch.arange(1500)).to(device)
    cache.open(0, 2000)  # the first upload of a table row allocates pinned memory
    cache.close(0)
    with no_host_waits():
        cache.open(0, 2000)
        cache.begin_prefill(0, 1500)
        for layer in range(LAYERS):
            cache.write_prompt(layer, 0, keys, keys)
            indexes[layer].build(0, keys[:, 4 : 4 + cache.lengths[0]], keys)
        cache.finish_prompt(0)
        for _ in range(20):
            cache.begin_step([0], indexes)
            cache.end_step([0], indexes)
        assert cache.lengths[0] == (1520 - 1 - 4 - 12) // 8 * 8
        cache.close(0)
    torch.cuda.synchronize()


@pytest.mark.parametrize("device_layers", [0, 1, LAYERS])
def test_kernels_find_the_rows(device: torch.device, device_layers: int) -> None:
    run = CacheRun(make_config(4, 12, 8, device_layers=device_layers), device)
    for _ in run.prefill(0, 1, 2500, 3000):
        pass
    for _ in range(30):
        run.step()
    torch.cuda.synchronize()
    length, extents = run.cache.lengths[1], run.cache.extents
    for layer in range(LAYERS):
        rows = extents.read(as_kernels_read(run, layer), 1, length)
        assert rows.is_cuda
        check_rows(rows.cpu(), rows_of(0, layer, torch.arange(4, 4 + length)))
    assert torch.equal(extents.device_table.cpu(), extents.table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_the_host_pool_is_pinned_and_takes_strided_rows(device: torch.device, dtype: torch.dtype) -> None:
    pool = HostPool(RowForm(8, 128, dtype, dtype is torch.int8), 3, 4, device)
    assert pool.rows.is_pinned()
    for plane in pool.planes:
        plane.zero_()
    parts = [torch.randn(2, 8, 300, *plane.shape[4:], device=device).to(plane.dtype) for plane in pool.planes]
    pool.write(2, 1, slice(700, 900), [part[:, :, 50:250] for part in parts])
    pool.write(3, 0, slice(0, 1), [part[:1, :, 7:8] for part in parts])
    torch.cuda.synchronize()
    for plane, part in zip(pool.planes, parts, strict=True):
        expected = torch.zeros_like(plane)
        expected[2, 1:, :, 700:900], expected[3, 0, :, 0] = part[:, :, 50:250].cpu(), part[0, :, 7].cpu()
        assert torch.equal(plane, expected)


@pytest.mark.parametrize("stride", [(1 << 29) - 1, 1 << 29])
def test_runs_further_apart_than_a_strided_copy_allows(device: torch.device, stride: int) -> None:
    """The driver's strided copies step over less than 2 GiB: beyond that each KV head travels alone."""
    pool = HostPool(RowForm(2, 4, torch.float32, False), 1, 2, device)
    pool.rows.zero_()
    memory = torch.empty(stride + 3 * 8, device=device)
    rows = memory.as_strided((1, 2, 3, 2, 4), (stride, stride, 8, 4, 1))
    rows.copy_(torch.randn(rows.shape))
    pool.write(1, 0, slice(5, 8), [rows])
    torch.cuda.synchronize()
    expected = torch.zeros_like(pool.rows)
    expected[1, :, :, 5:8] = rows.cpu()
    assert torch.equal(pool.rows, expected)


def test_index_work_that_fails_ends_with_its_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SideStream", slow_stream(SIDE_CYCLES))
    run = CacheRun(make_config(4, 12, 8, offload="always"), device)
    for _ in run.prefill(0, 0, 1500, 2000):
        pass

    def fail(slot: int, start: int, keys: Tensor) -> None:
        raise RuntimeError("broken")  # of memory that is short, the eviction would be tried again

    monkeypatch.setattr(run.indexes[1], "append", fail)
    with pytest.raises(RuntimeError, match="broken"):
        run.step()
    run.close(0)
    monkeypatch.undo()
    for _ in run.prefill(1, 0, 1500, 2000):
        pass
    for _ in range(30):
        run.step()
    run.check_contents()
