"""What attention on the GPU decides on the host: tiles, splits, scratch memory, refusals. The kernel: tests/gpu."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest
import torch
from tests.plugins.index_cases import context_of

from kvseek.core.batch import Batch, RequestState, Selection
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError
from kvseek.core.extents import ExtentTable
from kvseek.core.index_context import LayerRows
from kvseek.kernels.cuda.attention.attend import (
    MAX_SPLITS,
    AttendArguments,
    DeviceAttention,
    HeadTiles,
    LayerAttention,
    Splits,
)
from kvseek.kernels.cuda.attention.hot_rows import HotRows, empty_frames, fitting_steps, hit_rate
from kvseek.plugins.contract import Budget
from kvseek.plugins.registry import get_method


class RecordingKernels:
    """Stands for the kernels of a GPU with 132 multiprocessors; notes what is launched."""

    multiprocessors = 132

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int, int], int, ctypes.Structure]] = []

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: ctypes.Structure,
        shared_bytes: int,
        overlap: bool,
    ) -> None:
        assert overlap
        assert shared_bytes < 100 << 10  # of the smallest multiprocessors
        self.launches.append((name, grid, threads, AttendArguments.from_buffer_copy(arguments)))


SHAPE: dict[str, Any] = {
    "num_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype": torch.bfloat16,
    "window_rows": 576,
    "sink": 64,
    "entries": 100,
    "max_batch": 4,
    "scaling": 128**-0.5,
    "device": torch.device("cpu"),
}


ROWS = torch.zeros(2, 8, 100, dtype=torch.int32)


def make_hot_rows(entries: int = 100, steps: int = 1) -> HotRows:
    frames = empty_frames(ExtentTable(5, 3, 6), 8)
    return HotRows.make(frames, slots=4, entries=entries, steps=steps, head_dim=128, dtype=torch.bfloat16)


def make(**changes: Any) -> DeviceAttention:
    return DeviceAttention(cast(CudaKernels, RecordingKernels()), **{**SHAPE, **changes})


def indices(attention: DeviceAttention, batch: int = 2) -> torch.Tensor:
    return torch.zeros(batch, attention.kv_heads, attention.entries, dtype=torch.int32)


def launch(attention: DeviceAttention, **changes: Any) -> torch.Tensor:
    batch = 2
    shape = (5, attention.kv_heads, attention.window_rows, 2, attention.head_dim)
    arguments: dict[str, Any] = {
        "queries": torch.zeros(batch, attention.num_heads, attention.head_dim, dtype=attention.dtype),
        "batch": Batch.of([RequestState(slot=0, sink_rows=1, length=0, dense=True)] * batch, torch.zeros(5, 3).int()),
        "window": torch.zeros(shape, dtype=attention.dtype),
        "rows_pointer": 4096,
        "extent_stride": 1 << 21,
        "selection": Selection(indices(attention)),
        **changes,
    }
    return attention.launch(**arguments)


@pytest.mark.parametrize(
    ("dtype", "dim", "group", "heads", "tiles"),
    [
        (torch.bfloat16, 128, 4, 8, 1),
        (torch.float16, 128, 9, 16, 1),
        (torch.bfloat16, 256, 9, 8, 2),
        (torch.float32, 128, 3, 4, 1),
        (torch.float32, 128, 16, 8, 2),
        (torch.float32, 256, 5, 4, 2),
    ],
)
def test_head_tiles(dtype: torch.dtype, dim: int, group: int, heads: int, tiles: int) -> None:
    found = HeadTiles.of(dtype, dim, group)
    assert (found.heads, found.tiles) == (heads, tiles)


def test_a_dense_scan_of_one_request_is_one_wave() -> None:
    attention = make(entries=0)
    splits, resident = attention.splits, 132 * attention.tiles.resident_ctas
    assert resident - 8 < splits.most * 8 <= resident
    assert splits.most == splits.dense + 5, "of the window"


@pytest.mark.parametrize("lists", [1, 8, 64, 1024])
@pytest.mark.parametrize("entries", [0, 1, 100, 1024, 4096, 20000])
@pytest.mark.parametrize("window_rows", [2, 576, 100000])
def test_splits_fit_the_kernel(lists: int, entries: int, window_rows: int) -> None:
    splits = Splits.plan(lists, window_rows, entries, 396, None)
    assert splits.dense >= 1
    assert splits.most <= MAX_SPLITS
    assert splits.selected_rows % 16 == 0
    window = min(-(-window_rows // 128), 32)
    assert splits.most >= window + max(splits.dense, -(-entries // splits.selected_rows))


@pytest.mark.parametrize(("entries", "rows"), [(100, 64), (512, 64), (513, 128), (1280, 128), (20000, 224)])
def test_rows_of_a_unit_of_selected_rows(entries: int, rows: int) -> None:
    """A tile of 16 rows for each of a CTA's warps if they are few, two else."""
    assert Splits.plan(8, 576, entries, 396, None).selected_rows == rows


@pytest.mark.parametrize(("splits", "batch", "ctas"), [(None, 1, 49), (None, 4, 49), (1, 1, 7), (1, 2, 14), (1, 8, 49)])
def test_a_launch_has_no_more_ctas_than_the_gpu_holds(splits: int | None, batch: int, ctas: int) -> None:
    attention = make(splits=splits, max_batch=8)
    states = [RequestState(slot=0, sink_rows=1, length=0, dense=True)] * batch
    queries = torch.zeros(batch, 32, 128, dtype=torch.bfloat16)
    launch(attention, queries=queries, batch=Batch.of(states, torch.zeros(5, 3).int()), selection=None)
    ((_, grid, _, arguments),) = attention.kernels.launches  # type: ignore[attr-defined]
    assert (grid, arguments.batch) == ((ctas, 8, 1), batch)


def test_launch_describes_what_it_is_given() -> None:
    hot = make_hot_rows(steps=3)
    attention = make(hot=hot)
    out = launch(attention)
    assert out.shape == (2, 32, 128)
    ((name, grid, threads, arguments),) = attention.kernels.launches  # type: ignore[attr-defined]
    assert (name, grid, threads) == ("kvseek_attend", (49, 8, 1), 128)
    splits = attention.splits
    found = (arguments.batch, arguments.dense_splits, arguments.dense_rows, arguments.selected_rows)
    assert found == (2, splits.dense, splits.dense_rows, splits.selected_rows)
    assert arguments.out == out.data_ptr()
    found = (arguments.hot_rows, arguments.hot_places, arguments.frames, arguments.hits, arguments.hot_buffers)
    assert found == (*(array.data_ptr() for array in (hot.rows, hot.places, hot.frames, hot.hits)), 4)
    assert (arguments.window_stride, arguments.table_stride) == (8 * 576 * 2 * 128, 3)
    assert arguments.scale == pytest.approx(128**-0.5 * 1.4426950408889634)
    launch(attention, selection=None)
    arguments = attention.kernels.launches[1][3]  # type: ignore[attr-defined]
    assert (arguments.selected, arguments.hot_rows) == (None, None)


def test_rows_in_8_bits_have_scales_of_their_own() -> None:
    hot = HotRows.make(make_hot_rows().frames, slots=4, entries=100, steps=1, head_dim=128, dtype=torch.int8)
    assert hot.scales is not None
    attention = make(hot=hot, rounded_rows=True)
    launch(attention, extent_stride=1024 * 260)
    ((*_, arguments),) = attention.kernels.launches  # type: ignore[attr-defined]
    assert (arguments.hot_rows, arguments.hot_scales) == (hot.rows.data_ptr(), hot.scales.data_ptr())
    with pytest.raises(KernelError, match="rows_pointer"):
        launch(attention, extent_stride=1024 * 260 + 4)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_layers_attention_knows_its_window_and_its_rows(on_host: bool) -> None:
    kernel = make()
    window = torch.zeros(5, 8, 576, 2, 128, dtype=torch.bfloat16)
    pool = torch.zeros(1, 8, 1, 2, 128, device="cpu" if on_host else "meta")
    attention = LayerAttention(kernel, window, LayerRows(pool, 4096, 1 << 21))
    queries, lse = torch.zeros(2, 32, 128, dtype=torch.bfloat16), torch.zeros(2, 32)
    batch = Batch.of([RequestState(slot=0, sink_rows=1, length=0, dense=True)] * 2, torch.zeros(5, 3).int())
    out = attention(queries, batch, None, lse=lse)
    ((*_, arguments),) = kernel.kernels.launches  # type: ignore[attr-defined]
    assert (arguments.out, arguments.lse, arguments.window) == (out.data_ptr(), lse.data_ptr(), window.data_ptr())
    assert (arguments.rows, arguments.extent_stride, arguments.rows_on_host) == (4096, 1 << 21, on_host)


def test_layers_share_scratch_memory_if_it_is_large_enough() -> None:
    first = make()
    assert make(scratch=first.scratch).scratch is first.scratch
    with pytest.raises(KernelError, match="scratch"):
        make(max_batch=8, scratch=first.scratch)


def test_hot_rows_are_forgotten_slot_by_slot() -> None:
    hot = make_hot_rows()
    hot.places.fill_(3)
    hot.forget(1)
    assert (hot.places[1] == -1).all()
    assert (hot.places[[0, 2, 3]] == 3).all()


@pytest.mark.parametrize(
    ("entries", "steps", "kept"), [(100, 8, 8), (8192, 8, 6), (30_000, 2, 1), (40_000, 1, 0), (0, 1, 0), (7, 0, 0)]
)
def test_frames_have_numbers_of_16_bits(entries: int, steps: int, kept: int) -> None:
    assert fitting_steps(entries, steps) == kept


def test_hits_are_a_share_of_all_layers_rows() -> None:
    layers = [make_hot_rows(), make_hot_rows()]
    assert hit_rate(layers) is None
    assert hit_rate([]) is None
    layers[0].hits[1, 2] = torch.tensor([3, 1])
    layers[1].hits[3, 0, 1] = 4
    assert hit_rate(layers) == 3 / 8


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("dtype", {"dtype": torch.float64}),
        ("head_dim", {"head_dim": 80}),
        ("head_dim", {"head_dim": 288}),
        ("num_heads / num_kv_heads", {"num_heads": 136}),
        ("num_heads", {"num_heads": 12}),
        ("sink", {"sink": 576}),
        ("hot.rows", {"hot": make_hot_rows(entries=99)}),
        ("hot.rows", {"hot": make_hot_rows(), "dtype": torch.float16}),
        ("splits", {"splits": 97}),
        ("dtype", {"dtype": torch.float32, "rounded_rows": True}),
        ("hot.rows", {"hot": make_hot_rows(), "rounded_rows": True}),
    ],
)
def test_shapes_that_the_kernel_lacks_are_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match=f"{field} = .*must be"):
        make(**changes)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("batch", {"batch": Batch(torch.zeros(5, 16).int(), torch.zeros(5, 3).int())}),
        ("queries", {"queries": torch.zeros(2, 32, 128)}),
        ("window", {"window": torch.zeros(5, 8, 575, 2, 128, dtype=torch.bfloat16)}),
        ("selection.rows", {"selection": Selection(torch.zeros(2, 8, 99, dtype=torch.int32))}),
        ("selection.rows", {"selection": Selection(torch.zeros(2, 8, 100, dtype=torch.int64))}),
        ("lse", {"lse": torch.zeros(2, 32, dtype=torch.bfloat16)}),
        ("rows_pointer", {"rows_pointer": 4097}),
        ("rows_pointer", {"extent_stride": 4}),
        ("out", {"out": torch.zeros(2, 128, 32, dtype=torch.bfloat16).transpose(1, 2)}),
    ],
)
def test_launches_that_would_read_elsewhere_are_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match=f"{field}.* = "):
        launch(make(), **changes)


def test_full_on_the_gpu_selects_nothing() -> None:
    method = get_method("full")
    kernels = cast(CudaKernels, RecordingKernels())
    context = context_of(method.configure({}), 64, 2, ExtentTable(1, 1, 1), [7], dtype=torch.bfloat16, cuda=kernels)
    index = method.create(context)
    batch = Batch.of([RequestState(slot=0, length=7)], torch.zeros(1, 1).int())
    assert index.select(torch.zeros(1, 4, 64), batch) is None
    assert (index.budget(7), index.bytes_per_token) == (Budget(7), 0.0)
