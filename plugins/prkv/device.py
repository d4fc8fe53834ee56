"""PRKV on the GPU: the reference's arrays, filled and searched by CUDA kernels (PRKV paper, section 4)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvseek.core.config import require
from kvseek.core.errors import KernelError
from kvseek.plugins.batch import DeviceBatch, RequestState, pack
from kvseek.plugins.contract import DeviceIndex, IndexContext, LayerRows
from kvseek.plugins.selection import DeviceSelection, Selection
from kvseek.plugins.shared.group import GROUP_REDUCTIONS

from .config import Config
from .observe import observe, require_rows
from .reference import ReferenceIndex, update_is_due
from .store import RowStore, cached_pages
from .update import Updater

BOX_THREADS = 256

logger = logging.getLogger(__name__)


class BoxArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_boxes and _join, as in boxes.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "table", "boxes", "pending", "held")),
        *((name, c_int64) for name in ("head_stride", "token_stride")),
        *((name, c_int32) for name in ("kv_heads", "tokens", "first", "held_pages")),
    )


class SelectArguments(ctypes.Structure):
    """Arguments of kvseek_prkv_select, as in select.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "requests", "table", "boxes", "static_rows", "scores")),
        *((name, c_void_p) for name in ("normalisers", "finished", "picked", "recent", "static_held", "held")),
        *((name, c_void_p) for name in ("rows", "cached", "keep")),
        *((name, c_int32) for name in ("kv_heads", "max_extents", "top_k", "window_queries")),
        *((name, c_int32) for name in ("held_pages", "static_room")),
        *((name, c_float) for name in ("scaling", "near", "far")),
    )


class Workspace:
    """Intermediate results of a selection. Layers run one after another, so one workspace serves all of them.

    Scores of pages lie in extents, as boxes do: 4 x lanes bytes per page and KV head, once and not per layer. The
    rest is kept for each batch size, for captured graphs hold its addresses.
    """

    def __init__(self, context: IndexContext, lanes: int, pages_of_extent: int) -> None:
        self._context, self._lanes = context, lanes
        pages = (context.extents.capacity, context.num_kv_heads, pages_of_extent)
        self.scores = torch.empty((*pages, lanes), dtype=torch.float32, device=context.device)
        self._by_tasks: dict[int, dict[str, Any]] = {}

    def __call__(self, batch: int, multiprocessors: int) -> dict[str, Any]:
        """CTAs of a task, and arrays by their names in SelectArguments."""
        tasks = batch * self._context.num_kv_heads
        if tasks not in self._by_tasks:
            chunks, device = max(1, multiprocessors // tasks), self._context.device
            shape = (tasks, chunks, self._lanes, 2)
            self._by_tasks[tasks] = {
                "chunks": chunks,
                "normalisers": torch.empty(shape, dtype=torch.float32, device=device),
                "finished": torch.zeros(tasks, dtype=torch.int32, device=device),
            }
        return self._by_tasks[tasks]


class CudaIndex(DeviceIndex):
    """The index of one layer. Boxes, static sets and exchanges are the reference's; bounds differ by rounding."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.reference = ReferenceIndex(context)  # owns the arrays
        self.config: Config = context.config
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self._kernels = context.cuda
        self.reference.observe = partial(observe, context.cuda)
        self._threads = select_threads(context.head_dim)
        if "prkv" not in context.shared:
            lanes = 1 if self.config.group_reduce == "mean" else context.group_size
            context.shared["prkv"] = Workspace(context, lanes, self.reference.pages_of_extent)
        self.workspace: Workspace = context.shared["prkv"]
        self._pending = torch.empty(
            (context.extents.slots, context.num_kv_heads, 2, context.head_dim),
            dtype=context.dtype,
            device=context.device,
        )
        keeps = self.config.most_static + cached_pages(self.config) > 0
        self.store = RowStore(context) if keeps else None  # of use until `bind` says that the rows are on the device
        self._updater: Updater | None = None
        self._steps = [0] * context.extents.slots

    @property
    def bytes_per_token(self) -> float:
        """See ReferenceIndex.bytes_per_token."""
        return self.reference.bytes_per_token

    def bind(self, rows: LayerRows) -> None:
        """See Index.bind."""
        super().bind(rows)
        if not rows.on_host:
            self.store = None
        self._updater = Updater(self.context, self.reference, rows, self.store)

    def forget(self, slot: int) -> None:
        """See Index.forget."""
        self.reference.forget(slot)
        if self._updater is not None:
            self._updater.forget(slot)
        if self.store is not None:
            self.store.forget(slot)

    def plan(self, length: int) -> tuple[int, ...]:
        """The kernels need no numbers."""
        return ()

    def attended(self, length: int) -> int:
        """Rows of a region that a KV head attends to."""
        return min(self.config.top_k, length)

    def arrange(self, slot: int, keys: Tensor, queries: Tensor) -> Tensor | None:
        """See ReferenceIndex.arrange; nothing is read back."""
        return self.reference.arrange(slot, keys, queries)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """See Index.build. The store gets the static rows with the attention of the first step."""
        self._steps[slot] = 0
        self.reference.start(slot, queries)
        if keys.shape[1]:
            self.stage(slot, 0, keys)

    def stage(self, slot: int, start: int, keys: Tensor) -> None:
        """See DeviceIndex.stage: boxes of new pages, and what is to join the last page."""
        require_rows("keys", keys, self.context.dtype)
        arguments = self._box_arguments(slot, start)
        arguments.keys, arguments.tokens = keys.data_ptr(), keys.shape[1]
        arguments.head_stride, arguments.token_stride = keys.stride(0), keys.stride(1)
        items = (keys.shape[1] // self.config.page + 2) * self.context.head_dim // 8
        grid = (-(-items // BOX_THREADS), self.context.num_kv_heads, 1)
        self._kernels.launch("kvseek_prkv_boxes", grid, BOX_THREADS, arguments)

    def commit(self, slot: int, start: int, count: int) -> None:
        """See DeviceIndex.commit: keys join the page that others began. New pages show by the length alone."""
        if start % self.config.page:
            grid = (self.context.num_kv_heads, 1, 1)
            self._kernels.launch("kvseek_prkv_join", grid, self.context.head_dim, self._box_arguments(slot, start))

    def refresh(self, slots: Sequence[int]) -> None:
        """See Index.refresh: publish prepared updates, start those that are due."""
        updater = self._updater
        assert updater is not None, "the engine binds every index"
        for slot in slots:
            if len(updater):
                updater.publish(slot)
            self._steps[slot] += 1
            if update_is_due(self.config, self.context.layer, self._steps[slot]):
                try:
                    updater.start(slot)
                except torch.OutOfMemoryError:  # the old static set serves on
                    logger.warning("no device memory to choose a static set for slot %d; tried again later", slot)

    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> DeviceSelection:
        """See DeviceIndex.launch_select: one kernel. Static places come first, then those of pages, ascending."""
        return self._launch_select(queries, batch, live=True)

    def select(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        """See Index.select; leaves no trace: no attention need follow that fills the store."""
        if queries.dtype is not self.context.dtype or not queries.is_cuda:
            limit = f"{self.context.dtype} on the GPU, as the index was made for"
            raise KernelError(f"queries: {queries.dtype} on {queries.device}: must be {limit}")
        lengths = [self.context.lengths[slot] for slot in slots]
        states = [RequestState(0, slot, n, 0, 0, 0, 0, n, False) for slot, n in zip(slots, lengths, strict=True)]
        batch = DeviceBatch(pack(states).to(queries.device), self.context.extents.device_table)
        rows = self._launch_select(queries.contiguous(), batch, live=False).rows
        return Selection(rows, 1, tuple(self.attended(length) for length in lengths))

    def _launch_select(self, queries: Tensor, batch: DeviceBatch, live: bool) -> DeviceSelection:
        """`live`: record queries, count pages, and use and fill the store."""
        heads, top_k, arrays = self.context.num_kv_heads, self.config.top_k, self.reference
        scratch = self.workspace(batch.size, self._kernels.multiprocessors)
        shape, store = (batch.size, heads, top_k), self.store if live else None
        rows = torch.empty(shape, dtype=torch.int32, device=queries.device)
        arguments = SelectArguments(
            **_pointers(arrays, "boxes", "static_rows"),
            **_pointers(self.workspace, "scores"),
            queries=queries.data_ptr(),
            requests=batch.requests.data_ptr(),
            table=batch.table.data_ptr(),
            normalisers=scratch["normalisers"].data_ptr(),
            finished=scratch["finished"].data_ptr(),
            rows=rows.data_ptr(),
            kv_heads=heads,
            max_extents=batch.table.shape[1],
            top_k=top_k,
            window_queries=self.config.window_queries,
            static_room=self.config.most_static,
            scaling=self.context.scaling,
            near=(1 + self.config.box_radius) / 2,
            far=(1 - self.config.box_radius) / 2,
        )
        if live:
            arguments.picked, arguments.recent = arrays.picked.data_ptr(), arrays.recent.data_ptr()
        selection = DeviceSelection(rows)
        if store is not None:
            selection = DeviceSelection(rows, store.rows, torch.empty_like(rows), torch.empty_like(rows))
            arguments.static_held, arguments.held = store.static_held.data_ptr(), store.held.data_ptr()
            arguments.cached, arguments.keep = _address(selection.cached), _address(selection.keep)
            arguments.held_pages = store.held.shape[2]
        grid = (scratch["chunks"], batch.size * heads, 1)
        self._kernels.launch("kvseek_prkv_select", grid, self._threads, arguments, overlap=True)
        return selection

    def _box_arguments(self, slot: int, start: int) -> BoxArguments:
        arguments = BoxArguments(
            table=self.context.extents.device_table[slot].data_ptr(),
            boxes=self.reference.boxes.data_ptr(),
            pending=self._pending[slot].data_ptr(),
            kv_heads=self.context.num_kv_heads,
            first=start,
        )
        if self.store is not None and self.store.held.shape[2]:
            arguments.held, arguments.held_pages = self.store.held[slot].data_ptr(), self.store.held.shape[2]
        return arguments


def select_threads(head_dim: int) -> int:
    """Threads of a CTA of the selection, as in layout.cuh."""
    return 512 if head_dim <= 128 else 256


def cuda_defines(config: Config, head_dim: int, group_size: int) -> dict[str, int]:
    """Macros that layout.cuh expects; raises ConfigError on what the kernels do not support."""
    limit = "a multiple of 32 up to 256 for PRKV on the GPU"
    require(head_dim % 32 == 0 and head_dim <= 256, "head_dim", head_dim, limit, "build with --device cpu")
    pages, most = config.top_k // config.page, select_threads(head_dim)
    limit = f"at most {most} pages of {config.page} rows on the GPU"
    require(pages <= most, "top_k", config.top_k, limit, "attend to fewer rows, or build with --device cpu")
    return {
        "PRKV_PAGE": config.page,
        "PRKV_PAGES": pages,
        "PRKV_REDUCTION": GROUP_REDUCTIONS.index(config.group_reduce),
    }


def _pointers(owner: object, *names: str) -> dict[str, int]:
    return {name: getattr(owner, name).data_ptr() for name in names}


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
