"""The contract between the engine and a retrieval method.

The engine owns the cache: a device-resident window (sink, local, update buffer) and a retrieval region whose rows lie in
host memory or on the device. A method owns one `Index` per layer over the retrieval region, which chooses for each query the
retrieval rows to attend to. docs/add_a_method.md says how to add a method.

Symbols: H query heads, G KV heads, D head size, n retrieval tokens of a slot. Keys and queries are given as attention
uses them: after RoPE and, for Qwen3, after QK-norm. KV head j serves query heads j*H/G .. (j+1)*H/G - 1.

An engine on a GPU calls an index on the device's streams, and `select` and `attend` while it captures a decode step as a
CUDA graph. There both are a fixed sequence of kernel launches: they must not synchronise, must depend on nothing but their
arguments' shapes, read all that varies between steps from the `Batch`, and skip requests whose `dense` field is set.
`Batch.requests` is uploaded after the launches of `build`, `publish` and `refresh` and before those of `select`. So a kernel
of a selection may read their results even before it waits for the preceding kernel of the graph (kernels/cuda/overlap.cuh).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from kvseek.core.batch import Batch, Selection
from kvseek.core.index_context import IndexContext
from kvseek.core.streams import SideWork

LAST_QUERIES = 2048  # most queries of a prompt that Index.build is given


@dataclass(frozen=True)
class Budget:
    """What a decode step reads of a retrieval region of a given length.

    Attributes
    ----------
    rows : float
        Rows that a KV head attends to, averaged over the KV heads; all rows of the region if the layer attends densely.
    method_fields : tuple of int
        At most 4 numbers that the engine puts into the batch for the method's kernels (RequestState.method_fields), the same in
        all layers.
    """

    rows: float
    method_fields: tuple[int, ...] = ()


class Attention(Protocol):
    """Attention of one layer over the window and the retrieval rows, in host memory or on the device."""

    def __call__(self, queries: Tensor, batch: Batch, selection: Selection | None) -> Tensor:
        """Attend over the window and the selected rows (None: every row): queries [batch, H, D] to outputs [batch, H, D]."""


class Index(ABC):
    """Retrieval index of one layer over the retrieval regions of all slots.

    A retrieval row is known by its *place*: its number among the rows of a slot and KV head, in the order of the tokens.
    """

    def __init__(self, context: IndexContext) -> None:
        self.context = context

    @property
    @abstractmethod
    def bytes_per_token(self) -> float:
        """Bytes that the index keeps per retrieval token, for all KV heads of this layer."""

    @abstractmethod
    def build(self, slot: int, keys: Tensor, queries: Tensor) -> SideWork | None:
        """Index a slot after this layer's prefill, replacing all that the slot held or had under way.

        Returns the work that is left running on a side stream. The engine waits for it before the first decode step of the slot
        and before the slot receives another prompt, and limits the number of layers whose work runs at a time. It must read a
        copy of the slot's row of `extents.device_table`, because a cancelled request's row is cleared without waiting for it.

        Parameters
        ----------
        keys : Tensor [G, n, D]
            Retrieval keys in token order; `context.lengths[slot]` is n already. n may be 0.
        queries : Tensor [H, w, D]
            The last w <= LAST_QUERIES queries of the prompt. Of a prompt whose beginning is reused only those that are read are
            known, at least as many as Traits.last_queries says.
        """

    @abstractmethod
    def append(self, slot: int, start: int, keys: Tensor) -> None:
        """Take in keys [G, u, D] of the places start .. start + u - 1, which will leave the window; selections do not see them.

        The slot may have got their extents since `build`: arrays there hold anything.

        On a GPU it runs on a side stream beside decode steps, so it must not touch anything that they read or write.
        """

    def publish(self, slot: int, start: int, count: int) -> None:  # noqa: B027  most methods need only the length
        """Let selections see the places that `append` took in last; `context.lengths[slot]` already counts them.

        It is called between steps.
        """

    def adopt(self, slot: int, length: int) -> None:  # noqa: B027  most methods need only the extents
        """Begin a slot whose first `length` places have entries already, in extents that an earlier request has written.

        It takes the place of `build` for a prompt that begins like that request's; `append` and `publish` of all further places
        follow. The entries must not be written to. Only called with Traits.prefix_reuse "entries".

        Parameters
        ----------
        length : int
            A multiple of 1,024.
        """

    @abstractmethod
    def budget(self, length: int) -> Budget:
        """Return the work of a step over a retrieval region of `length` >= 1 tokens."""

    @abstractmethod
    def select(self, queries: Tensor, batch: Batch) -> Selection | None:
        """Choose rows for queries [batch, H, D]; every request that is not dense has at least one retrieval token.

        Returns None, for any queries, if this layer attends densely.
        """

    def attend(self, queries: Tensor, batch: Batch, selection: Selection | None, attention: Attention) -> Tensor:
        """Attend over window and selection: queries [batch, H, D] to outputs [batch, H, D].

        Most methods leave this to `attention`, the engine's own attention of the layer.
        """
        return attention(queries, batch, selection)

    def refresh(self, slots: Sequence[int]) -> None:  # noqa: B027  most methods have no upkeep
        """Do upkeep that is due after a decode step of these slots, off the critical path. None of them attended to everything.

        On a GPU the step has been launched and may still run, so that the host's time passes beside it: this reads nothing back.
        It starts side work that is due, and publishes on the current stream, behind the step, the results of side work that has
        ended, so that a step sees either the old state or the new one.
        """


def _no_codebooks(head_dim: int) -> dict[str, Tensor]:
    return {}


def _no_macros(head_dim: int, group_size: int) -> dict[str, int]:
    return {}


def _no_queries(tokens: int) -> int:
    return 0


@dataclass(frozen=True)
class Traits:
    """Properties of a method, for one Config of it, that the engine and the builder need before an index exists.

    Attributes
    ----------
    devices : tuple of str
        Devices that the method runs on: "cpu", "cuda".
    device_layers : int
        Number of first layers whose rows lie on a GPU's device with every cache.offload: their `select` gives None, so from
        host memory a step would read all of their rows over PCIe.
    kept_steps : int
        Number of a request's last steps whose selected rows a GPU keeps, in layers whose rows lie in host memory; 0: none.
    cache_defaults : mapping
        Defaults of CacheConfig fields, where the method needs others than the engine's.
    reports_rows : bool
        Whether `select` on a GPU gives the rows that are read; not where host cores choose them while they attend.
    cpu_library_on_gpu : bool
        Whether the method's index for the GPU calls compiled code of the CPU (kernels/cpu.so).
    prefix_reuse : "entries", "rows" or "copies"
        What requests whose prompts begin alike have in common (docs/conversations.md).
        "entries": whole extents with their rows and index entries. The entries
        of a full extent are made from its keys alone, by `build` and `append` alike. All else that the index keeps of a slot can
        be made from these entries (`Index.adopt`).
        "rows": whole extents with their rows. `build` indexes all keys of every prompt; the index keeps nothing in extents.
        "copies": no extents. Rows are copied into a request's own extents, and `build` indexes all keys of every prompt.
    rounded_rows : bool
        Whether rows may have 8 bits (cache.row_dtype): an index that reads rows itself knows none.
    verifies_drafts : bool
        Whether a step may have several tokens of a slot, of which the last may be taken back (engine/speculation.py): a selection
        follows from the region's keys and its own query, and a step leaves nothing in the index.
    last_queries : callable
        Takes the retrieval tokens n of a prompt; returns how many of its last queries `build` makes use of. So many of a
        prompt's last tokens are read, and not reused.
    codebooks : callable
        Takes the head size; returns tensors by name, which the builder computes once and stores beside the weights.
    cuda_macros : callable
        Takes head size and group size; returns macros that the method's GPU kernels are compiled with, beside those of
        builder/compile/cuda.py. Raises ConfigError for sizes that the kernels do not support.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    device_layers: int = 0
    kept_steps: int = 1
    cache_defaults: Mapping[str, Any] = field(default_factory=dict)
    reports_rows: bool = True
    cpu_library_on_gpu: bool = False
    prefix_reuse: Literal["entries", "rows", "copies"] = "copies"
    rounded_rows: bool = False
    verifies_drafts: bool = False
    last_queries: Callable[[int], int] = _no_queries
    codebooks: Callable[[int], dict[str, Tensor]] = _no_codebooks
    cuda_macros: Callable[[int, int], dict[str, int]] = _no_macros
