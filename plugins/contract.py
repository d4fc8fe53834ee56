"""The contract between the engine and a retrieval method.

The engine owns the cache: a device-resident window (sink, local, update buffer) and a retrieval region whose full rows
lie in host memory. A method owns one `Index` per layer over the retrieval region and answers, for each query, which
retrieval rows to attend to. Adding a method: docs/add_a_method.md.

Symbols: H query heads, G KV heads, D head size, n retrieval tokens of a slot. Keys and queries are what attention
sees: after RoPE and, for Qwen3, after QK-norm. KV head j serves query heads j*H/G .. (j+1)*H/G - 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvseek.core.cpu_library import CpuLibrary
from kvseek.core.extents import ExtentTable
from kvseek.plugins.attention.device import DeviceAttention

from .batch import DeviceBatch, RequestState, pack
from .selection import DeviceSelection, Selection

if TYPE_CHECKING:  # only engines of the GPU load the CUDA packages
    from kvseek.core.cuda import CudaKernels


@dataclass(frozen=True)
class LayerRows:
    """Where the full rows of a layer's retrieval region lie.

    Attributes
    ----------
    pool : Tensor [extents, G, 1024, 2, D], strided by extent
        Keys and values by place, addressed through `IndexContext.extents`. In host memory (pinned, on a GPU engine) or
        on the engine's device. On a GPU it may be read and written in the order of the current stream alone.
    pointer : int
        Address of extent 0, KV head 0, place 0 as the engine's device sees it.
    extent_stride : int
        Numbers from one extent of the layer to the next.
    """

    pool: Tensor
    pointer: int
    extent_stride: int

    @property
    def on_host(self) -> bool:
        """Whether the rows lie in host memory."""
        return self.pool.device.type == "cpu"


@dataclass(frozen=True)
class IndexContext:
    """What an index is built for. The same for every layer but `layer`."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float  # softmax scale, 1/sqrt(D)
    config: Any  # the method's own config dataclass
    codebooks: dict[str, Tensor]  # what the method's `codebooks` function gave when the engine was built
    extents: ExtentTable
    lengths: list[int]  # retrieval tokens per slot; kept by the cache, read-only for an index
    dtype: torch.dtype
    device: torch.device
    library: CpuLibrary | None  # compiled CPU kernels; None on the CPU: run the PyTorch reference
    cuda: CudaKernels | None = None  # kernels of the GPU; the index is a DeviceIndex if they are given
    shared: dict[str, Any] = field(default_factory=dict)  # one dictionary for all layers: work space they take turns in

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class Index(ABC):
    """Retrieval index of one layer over the retrieval regions of all slots.

    A retrieval row is known by its *place*: its number in the order in which the pool holds the rows of a slot and KV
    head. Places follow the tokens, unless `arrange` asks for another order; rows that leave the window come last.
    """

    def __init__(self, context: IndexContext) -> None:
        self.context = context
        self.rows: LayerRows | None = None

    def bind(self, rows: LayerRows) -> None:
        """Tell the index where its layer's rows lie; once, before anything is built."""
        self.rows = rows

    def forget(self, slot: int) -> None:  # noqa: B027  most methods have nothing under way
        """Drop what is under way for a slot, which is about to receive another prompt."""

    def arrange(self, slot: int, keys: Tensor, queries: Tensor) -> Tensor | None:
        """Choose the order in which the pool holds a prompt's rows, before they are written; arguments as for `build`.

        Returns
        -------
        Tensor, int64 [G, n], or None
            Per KV head, the retrieval token of each place: a permutation. None: token order.
        """
        return None

    @abstractmethod
    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        """Index a slot after this layer's prefill, replacing whatever the slot held.

        May leave work running on a side stream of the device; it keeps the tensors it reads, a copy of the slot's row of
        `extents.device_table` among them: a cancelled request's row is cleared without a wait for that work.

        Parameters
        ----------
        keys : Tensor [G, n, D]
            Retrieval keys by place; `context.lengths[slot]` is n already. n may be 0.
        queries : Tensor [H, w, D]
            The last w <= 2048 queries of the prompt.
        """

    def finish_build(self, slot: int) -> None:  # noqa: B027  most methods build at once
        """Make the current stream wait for what `build` left running; the prompt's last layer has been built."""

    @abstractmethod
    def extend(self, slot: int, keys: Tensor) -> None:
        """Append keys [G, u, D] that just left the window; `context.lengths[slot]` counts them already."""

    @abstractmethod
    def select(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        """Choose rows for queries [batch, H, D] of the given slots. Every slot holds at least one retrieval token."""

    def refresh(self, slots: Sequence[int]) -> None:  # noqa: B027  most methods have no upkeep
        """Do upkeep that is due, off the critical path, between steps.

        On a GPU: start side work that is due, and publish on the current stream what has ended since, so that a step
        sees the old state or the new one.
        """

    @property
    @abstractmethod
    def bytes_per_token(self) -> float:
        """Index bytes per retrieval token, all KV heads of this layer."""


class DeviceIndex(Index):
    """An index whose selection is a fixed sequence of kernel launches, so that a CUDA graph can hold it.

    Everything that varies between decode steps is read from a DeviceBatch; `launch_select` must not synchronise, must
    not depend on anything but its arguments' shapes, and skips requests whose `dense` field is set.
    """

    @abstractmethod
    def plan(self, length: int) -> tuple[int, ...]:
        """Numbers that the kernels need about a retrieval region of `length` tokens: at most 7, the same in all layers."""

    @abstractmethod
    def attended(self, length: int) -> int:
        """Rows of a retrieval region of `length` tokens that one KV head attends to (mean over the KV heads)."""

    @abstractmethod
    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> DeviceSelection | None:
        """Choose rows for queries [batch, H, D].

        None, whatever the queries: this layer attends densely. The upload of `batch.requests` lies between it and what
        `build`, `commit` and `refresh` launched: kernels may read what those wrote before they wait for the kernel
        before them (plugins/shared/overlap.cuh).
        """

    def launch_attend(
        self,
        queries: Tensor,
        batch: DeviceBatch,
        window: Tensor,
        selection: DeviceSelection | None,
        attention: DeviceAttention,
    ) -> Tensor:
        """Attend over window and selection: queries [batch, H, D] to outputs [batch, H, D]. As `launch_select` launches.

        Parameters
        ----------
        window : Tensor [slots, G, window, 2, D]
            The layer's windows.
        attention : DeviceAttention
            The common kernel, which reads rows wherever they lie.
        """
        assert self.rows is not None, "the engine binds every index"
        rows = self.rows
        return attention.launch(
            queries, batch, window, rows.pointer, rows.extent_stride, selection, on_host=rows.on_host
        )

    @abstractmethod
    def stage(self, slot: int, start: int, keys: Tensor) -> None:
        """Encode keys [G, u, D] for retrieval positions start .. start + u - 1, invisible to `launch_select` as yet.

        Runs on the current stream, which may be a side stream: it must touch nothing that decode steps read.
        """

    @abstractmethod
    def commit(self, slot: int, start: int, count: int) -> None:
        """Make staged positions visible; `context.lengths[slot]` counts them from now on. Runs between steps."""

    def extend(self, slot: int, keys: Tensor) -> None:
        """See Index.extend."""
        start = self.context.lengths[slot] - keys.shape[1]
        self.stage(slot, start, keys)
        self.commit(slot, start, keys.shape[1])

    def select(self, queries: Tensor, slots: Sequence[int]) -> Selection:
        """See Index.select: one launch outside of any graph."""
        lengths = [self.context.lengths[slot] for slot in slots]
        states = [
            RequestState(0, slot, length, 0, 0, 0, 0, length, False, self.plan(length))
            for slot, length in zip(slots, lengths, strict=True)
        ]
        batch = DeviceBatch(pack(states).to(queries.device), self.context.extents.device_table)
        selection = self.launch_select(queries.contiguous(), batch)
        if selection is None:
            return Selection.everything(lengths, self.context.num_kv_heads, queries.device)
        return Selection(selection.rows, 1, tuple(self.attended(length) for length in lengths))
