"""What an index and the kernels that serve it are told about their layer: where its rows lie, shapes, types, libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .cpu_library import CpuLibrary
from .extents import ExtentTable

if TYPE_CHECKING:  # only engines of the GPU load the CUDA packages
    from .cuda import CudaKernels

Shared = TypeVar("Shared")


@dataclass(frozen=True)
class LayerRows:
    """The memory that holds the rows of a layer's retrieval regions.

    Attributes
    ----------
    pool : Tensor [extents, G, 1024, 2, D]
        Keys and values by place, addressed through `IndexContext.extents`. The tensor is in host memory (pinned, for an engine
        on a GPU) or on the engine's device. On a GPU it may be read and written only in the order of the current stream.
    pointer : int
        Address of extent 0, KV head 0, place 0 as the engine's device sees it.
    extent_stride : int
        Numbers from one extent of the layer to the next.
    scales : Tensor, bfloat16 [extents, G, 1024, 2], or None
        Scales of keys and values, where `pool` holds integers of 8 bits (kernels/reference/attention/rounded_rows.py). Those of
        the 1,024 rows of an extent and KV head lie behind the rows.
    """

    pool: Tensor
    pointer: int
    extent_stride: int
    scales: Tensor | None = None

    @property
    def on_host(self) -> bool:
        """Whether the rows lie in host memory."""
        return self.pool.device.type == "cpu"


@dataclass(frozen=True)
class IndexContext:
    """All that an index is told about its layer and engine. Only `layer`, `rows` and `frames` differ between layers."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float  # softmax scale, 1/sqrt(D)
    config: Any  # the method's own Config
    codebooks: dict[str, Tensor]  # made by Traits.codebooks when the engine was built
    extents: ExtentTable
    lengths: list[int]  # retrieval tokens per slot; kept by the cache, read-only for an index
    dtype: torch.dtype
    device: torch.device
    # Tokens that enter a retrieval region together (cache.update): `build` is given a multiple of so many, and `append` starts at
    # one and is given one. A region's length follows from the number of the request's tokens alone.
    update: int = 256
    library: CpuLibrary | None = None  # compiled CPU kernels; None on the CPU: use the PyTorch reference
    cuda: CudaKernels | None = None  # kernels of the GPU; None on the CPU
    # None while memory is divided, before rows are placed. The index then allocates what it needs for rows in host memory,
    # which is the most that it can need.
    rows: LayerRows | None = None
    # For each row of the pool, int16 [extents, G, 1024], the frame to which it was copied last, where the engine keeps copies on
    # a GPU (kernels/cuda/attention/hot_rows.py); else None.
    frames: Tensor | None = None
    shared: dict[str, Any] = field(default_factory=dict)  # one dictionary for all layers: work space that they share
    shares_extents: bool = False  # whether slots may have extents in common, and a batch several requests of a slot
    reuses_prefixes: bool = False  # whether rows of requests that have ended are kept for later ones

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def share(self, name: str, make: Callable[[], Shared]) -> Shared:
        """Return what all layers have in common under a name; the first layer that asks makes it."""
        if name not in self.shared:
            self.shared[name] = make()
        made: Shared = self.shared[name]
        return made

    @property
    def scratch_extents(self) -> int:
        """Extents that the regions of a batch's requests have together at most: those of the pool, if none is shared.

        Arrays [scratch extents, G, 1024, ...] hold what a selection writes for each row of a region. Kernels find a request's
        part by `scratch` of kernels/request.h, and not by its slot's extents, which other requests may have too.
        """
        extents = self.extents
        return (extents.slots - 1) * extents.max_extents if self.shares_extents else extents.capacity


@dataclass(frozen=True)
class ShapeLimits:
    """Shapes of a model that compiled kernels support. This is the one place of each limit beside the kernels' sources.

    Attributes
    ----------
    max_head_dim : int
        Largest head size.
    max_group_size : int
        Most query heads that share a KV head.
    head_dim_step : int
        Head sizes are multiples of this number.
    """

    max_head_dim: int
    max_group_size: int
    head_dim_step: int = 1

    def fault(self, head_dim: int, group_size: int) -> str | None:
        """Name the field that is not supported, its value and its limit, for an error message; None if both are."""
        if head_dim % self.head_dim_step or not 1 <= head_dim <= self.max_head_dim:
            multiple = f"a multiple of {self.head_dim_step} up to" if self.head_dim_step > 1 else "at most"
            return f"head_dim = {head_dim}: must be {multiple} {self.max_head_dim}"
        if not 1 <= group_size <= self.max_group_size:
            return f"num_heads / num_kv_heads = {group_size}: must be at most {self.max_group_size}"
        return None
