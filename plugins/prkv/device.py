"""PRKV on the GPU: the reference's arrays, filled and searched by CUDA kernels (PRKV paper, section 4)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.config import EXTENT_TOKENS
from kvseek.core.cuda import CudaKernels
from kvseek.core.errors import KernelError, require
from kvseek.core.index_context import IndexContext
from kvseek.kernels.arguments import POWER_SUM_BYTES, pointers, require_numbered_rows
from kvseek.kernels.cuda.codes.store import MIN_DIM, CudaCodeStore
from kvseek.kernels.cuda.selection import SelectionWorkspace
from kvseek.kernels.structs import c_struct

from .config import Config
from .reference import ReferenceIndex
from .summaries import Boxes, Codes
from .update import Updater

logger = logging.getLogger(__name__)

BOX_THREADS, OBSERVE_THREADS = 256, 256
BLOCKS_OF_MULTIPROCESSOR = 2  # blocks of the observation that a multiprocessor holds at once
ALIGNMENT = 16  # bytes that kernels load at once, to which rows must be aligned
MOST_CTAS = 1024  # of a selection's task
STATIC_BIT = torch.iinfo(torch.int16).min  # of a scale, which is never negative: the sign marks a static row

BoxArguments = c_struct("plugins/prkv/cuda/boxes.cu", "BoxArguments")
SelectArguments = c_struct("plugins/prkv/cuda/select.cuh", "SelectArguments")
ObserveArguments = c_struct("plugins/prkv/cuda/observe.cu", "ObserveArguments")


class CudaBoxes(Boxes):
    """Boxes that equal the reference's."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        assert context.cuda is not None, "made by an index of CUDA kernels"
        self._kernels = context.cuda

    def selected(self) -> dict[str, Any]:
        """Return what a selection is given, by the names of its arguments."""
        radius = self.config.box_radius
        return {**pointers(self, "boxes"), "near": (1 + radius) / 2, "far": (1 - radius) / 2}

    def _enclose(self, slot: int, start: int, keys: Tensor) -> None:
        if keys.shape[1]:
            self.append(slot, start, keys)

    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """See Summaries.append. Writes the boxes of new pages, and the box of the keys that are to join the last page."""
        require_rows("keys", keys, self.context.dtype)
        arguments = self._arguments(slot, start)
        arguments.keys, arguments.tokens = keys.data_ptr(), keys.shape[1]
        arguments.head_stride, arguments.token_stride = keys.stride(0), keys.stride(1)
        items = (keys.shape[1] // self.config.page + 2) * self.context.head_dim // 8
        grid = (-(-items // BOX_THREADS), self.context.num_kv_heads, 1)
        self._kernels.launch("kvseek_prkv_boxes", grid, BOX_THREADS, arguments)

    def publish(self, slot: int, start: int) -> None:
        """See Summaries.publish. Lets keys join the page that earlier keys began. The length alone makes new pages visible."""
        if start % self.config.page:
            grid = (self.context.num_kv_heads, 1, 1)
            self._kernels.launch("kvseek_prkv_join", grid, self.context.head_dim, self._arguments(slot, start))

    def _arguments(self, slot: int, start: int) -> ctypes.Structure:
        return BoxArguments(
            table=self.context.extents.device_table[slot].data_ptr(),
            boxes=self.boxes.data_ptr(),
            pending=self.pending[slot].data_ptr(),
            kv_heads=self.context.num_kv_heads,
            first=start,
        )


class CudaCodes(Codes):
    """Codes that equal the reference's but for channels that lie at the border of two cells up to rounding.

    The scale of a static row has the sign of a negative number, by which the kernel that reads it anyway knows the row.
    """

    store: CudaCodeStore

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        require_numbered_rows("PRKV's codes on the GPU", context)

    def selected(self) -> dict[str, Any]:
        """Return what a selection is given, by the names of its arguments."""
        return self.store.arguments("high")

    def build(self, slot: int, keys: Tensor, static: Tensor) -> None:
        super().build(slot, keys, static)
        self.renew(slot, static[:, :0], static, None)

    def renew(self, slot: int, old: Tensor, static: Tensor, prepared: Tensor | None) -> None:
        """See Summaries.renew. Marks the scales of static rows, and no longer those that were."""
        scales = self.store.scales.view(torch.int16).view(-1)
        for tokens, is_static in ((old, False), (static, True)):
            rows = self._rows_of(slot, tokens)
            scales[rows] = scales[rows] | STATIC_BIT if is_static else scales[rows] & ~STATIC_BIT

    def _rows_of(self, slot: int, tokens: Tensor) -> Tensor:
        """Find the entries of tokens [G, m] in arrays [E, G, 1024]: int64 [G * m]."""
        extents = self.context.extents.device_table[slot].long()[tokens // EXTENT_TOKENS]
        heads = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        return ((extents * tokens.shape[0] + heads) * EXTENT_TOKENS + tokens % EXTENT_TOKENS).flatten()


class Workspace(SelectionWorkspace):
    """Intermediate results of a selection. Scores lie in extents, as pages do: 4 x group_size bytes per page and KV head."""

    def __init__(self, context: IndexContext, pages_of_extent: int) -> None:
        super().__init__(context)
        heads, lanes = context.num_kv_heads, context.group_size
        self.scores = self.new(torch.float32, context.extents.capacity, heads, pages_of_extent, lanes)
        self.normalisers = self.new(torch.uint8, heads, self.blocks(self.most, MOST_CTAS), lanes, POWER_SUM_BYTES)
        self.finished = self.zeros(self.tasks)


class CudaIndex(ReferenceIndex):
    """The reference's arrays, filled and searched by kernels. Static sets equal its own; pages' scores differ by rounding."""

    summaries: CudaBoxes | CudaCodes

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context, CudaBoxes(context) if context.config.page_score == "box" else CudaCodes(context))
        assert context.cuda is not None, "create() makes a CudaIndex only for CUDA kernels"
        self.observe = partial(observe, context.cuda)
        self._threads = select_threads(context.head_dim)
        self.workspace = context.share("prkv", lambda: Workspace(context, self.pages_of_extent))
        self.updater = Updater(context)

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        self.updater.forget(slot)
        super().build(slot, keys, queries)

    def refresh(self, slots: Sequence[int]) -> None:
        """See Index.refresh. Publishes updates that began PUBLISH_STEPS steps ago, and starts those that are due."""
        for slot in slots:
            if len(self.updater):
                self.updater.publish(self, slot)
            if self.count_step(slot):
                try:
                    self.updater.start(self, slot)
                except torch.OutOfMemoryError:  # the old static set stays in use
                    logger.warning("no device memory to choose a static set for slot %d; tried again later", slot)

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        """See Index.select. Launches one kernel. Equals the reference's but for pages of nearly equal scores.

        The kernel records the queries and counts the pages. Raises KernelError for queries of another dtype or device than the
        cache's.
        """
        work, config = self.workspace, self.config
        queries, rows, given = work.begin(self.context, queries, batch)
        arguments = SelectArguments(
            **given,
            **self.summaries.selected(),
            **pointers(self, "static_rows", "picked", "recent"),
            statics=self.static.data_ptr(),
            **pointers(work, "scores", "normalisers", "finished"),
            recent_queries=config.update_queries,
            most_static=config.most_static,
            scaling=self.context.scaling,
        )
        work.launch("prkv_select", work.blocks(batch.size, MOST_CTAS), self._threads, arguments)
        return Selection(rows)


def observe(kernels: CudaKernels, queries: Tensor, keys: Tensor, scaling: float, valid: Tensor | None = None) -> Tensor:
    """Compute the softmax attention of the observation window to each key, averaged over the window and a group's heads.

    Makes two launches on the current stream, and writes nothing as large as the products of queries and keys. Results differ
    from those of static.observation_scores by rounding.

    Parameters
    ----------
    queries : Tensor [H, w, D]
    keys : Tensor [G, n, D], n >= 1
        Queries and keys have the kernels' dtype and are on the GPU; each row is contiguous and aligned to 16 bytes.
    valid : Tensor, int32 [G], or None
        Number of first keys of each KV head that count; the keys after them score -1.

    Returns
    -------
    Tensor, float32 [G, n]
    """
    require_rows("keys", keys, keys.dtype)
    require_rows("queries", queries, keys.dtype)
    (heads, count), (all_heads, window) = keys.shape[:2], queries.shape[:2]
    chunks = max(1, BLOCKS_OF_MULTIPROCESSOR * kernels.multiprocessors // heads)
    scores = torch.empty((heads, count), dtype=torch.float32, device=keys.device)
    shape = (heads, chunks, all_heads // heads * window, 2)
    parts = torch.empty(shape, dtype=torch.float32, device=keys.device)
    arguments = ObserveArguments(
        keys=keys.data_ptr(),
        queries=queries.data_ptr(),
        valid=None if valid is None else valid.data_ptr(),
        parts=parts.data_ptr(),
        scores=scores.data_ptr(),
        key_head_stride=keys.stride(0),
        key_stride=keys.stride(1),
        query_head_stride=queries.stride(0),
        query_stride=queries.stride(1),
        count=count,
        window=window,
        scaling=scaling,
    )
    for name in ("kvseek_prkv_normalise", "kvseek_prkv_observe"):
        kernels.launch(name, (chunks, heads, 1), OBSERVE_THREADS, arguments)
    return scores


def require_rows(name: str, rows: Tensor, dtype: torch.dtype) -> None:
    """Raise KernelError unless the kernels can read rows [heads, n, D] of `dtype` without a copy."""
    strides = [stride * dtype.itemsize for stride in rows.stride()[:2]]
    aligned = all(number % ALIGNMENT == 0 for number in (rows.data_ptr(), *strides))
    if rows.dtype is not dtype or not rows.is_cuda or rows.stride(-1) != 1 or not aligned:
        limit = f"{dtype} on the GPU, rows of neighbouring numbers from multiples of {ALIGNMENT} bytes on"
        raise KernelError(f"{name}: {rows.dtype} on {rows.device}, strides {rows.stride()}: must be {limit}")


def select_threads(head_dim: int) -> int:
    """Return the threads of a CTA of the selection, as in layout.cuh."""
    return 512 if head_dim <= 128 else 256


def cuda_macros(config: Config, head_dim: int, group_size: int) -> dict[str, int]:
    """Return the macros that layout.cuh expects; raises ConfigError on sizes that the kernels do not support."""
    limit = "a multiple of 32 up to 256 for PRKV on the GPU"
    require(head_dim % 32 == 0 and head_dim <= 256, "head_dim", head_dim, limit, "build with --device cpu")
    pages, most = config.top_k // config.page, select_threads(head_dim)
    limit = f"at most {most} pages of {config.page} rows on the GPU"
    require(pages <= most, "top_k", config.top_k, limit, "attend to fewer rows, or build with --device cpu")
    macros = {
        "PRKV_PAGE": config.page,
        "PRKV_PAGES": pages,
    }
    if config.page_score == "codes":
        remedy = 'build with page_score = "box", or with --device cpu'
        require(head_dim >= MIN_DIM, "head_dim", head_dim, f">= {MIN_DIM} with page_score = 'codes' on the GPU", remedy)
        macros["PRKV_CODES"] = 1
    return macros
