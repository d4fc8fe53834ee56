"""Divides a GPU's memory when an engine is loaded, after measuring what its indexes and attentions take (docs/memory.md).

**A dry run** counts that memory: on a GPU without a GPU, on the CPU without allocating it. The
method's own classes run on PyTorch's meta device, where tensors have shapes and types but no numbers. What they would allocate is
counted, so there is no second formula to keep equal.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.cuda import CudaKernels
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.engine.cache.memory_layout import Footprint, MemoryLayout, divide_memory, slot_count
from kvseek.engine.loading.indexes import IndexMaker, make_attentions, ring_attention
from kvseek.engine.model.activation_memory import work_bytes
from kvseek.engine.parallel.cuda.ranks import DeviceRanks
from kvseek.kernels.cuda.attention.attend import DeviceAttention
from kvseek.plugins.contract import Index
from kvseek.plugins.registry import method_traits

META = torch.device("meta")
ALLOCATION_BYTES = 512  # PyTorch's CUDA allocator rounds the size of every tensor up to a multiple of this


@dataclass(frozen=True)
class IndexNeeds:
    """Bytes that the indexes and attentions of all layers take on the device.

    Attributes
    ----------
    extent : int
        Bytes that each extent of the pool adds.
    fixed : int
        Bytes that do not depend on the number of extents: those of the slots, and those that all layers share.
    """

    extent: int
    fixed: int

    @classmethod
    def of(cls, one: int, two: int) -> IndexNeeds:
        """Derive both from the bytes for a pool of one extent and for a pool of two."""
        return cls(two - one, max(0, 2 * one - two))


def divide_device_memory(maker: IndexMaker, footprint: Footprint, ranks: DeviceRanks | None = None) -> MemoryLayout:
    """Divide the GPU's free memory and that of the loaded weights or plans; raises CapacityError with the bytes of each part.

    The memory that a method allocates is measured: its indexes and the attentions are made twice, for pools of one and of two
    extents, and thrown away. Ranks divide alike, so that they have equally many extents: each as the one with the least memory.
    """
    assert maker.kernels is not None, "an engine on a GPU has kernels"
    device = maker.kernels.device
    one, two = (measured_bytes(maker, capacity) for capacity in (1, 2))
    if ranks is None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        device_bytes = free + torch.cuda.memory_allocated(device) + footprint.outside
    else:
        device_bytes = ranks.free_bytes() + footprint.weights
    return divide_measured(maker.config, IndexNeeds.of(one, two), device_bytes, footprint.weights, footprint.plan_work)


def divide_measured(
    config: EngineConfig, needs: IndexNeeds, device_bytes: int, weight_bytes: int, plan_work_bytes: int = 0
) -> MemoryLayout:
    """Divide `device_bytes`, which include the weights' bytes.

    The part of the indexes and attentions that does not grow with the cached tokens counts as work space. So does
    `plan_work_bytes`, the work space of TensorRT's plans, or what ranks sum in.
    """
    dtype = getattr(torch, config.dtype)
    return divide_memory(
        config,
        dtype,
        device_bytes=device_bytes,
        weight_bytes=weight_bytes,
        work_bytes=work_bytes(config, dtype) + needs.fixed + plan_work_bytes,
        index_bytes_per_token=needs.extent / len(config.model.row_layers) / EXTENT_TOKENS,
    )


def make_without_rows(maker: IndexMaker, capacity: int, slots: int) -> tuple[list[Index], list[DeviceAttention]]:
    """Make the indexes and attentions of all layers for a pool of `capacity` extents, without allocating that pool.

    The size of the indexes decides which layers' rows lie in host memory. So each index allocates what it needs for rows in
    host memory, and so do hot rows: that is the most that a layer takes. Indexes made for placed rows take a few KB a request
    more, which the work space's reserve covers.
    """
    assert maker.kernels is not None, "an engine on a GPU has kernels"
    device, config = maker.kernels.device, maker.config
    extents = ExtentTable(slots, extents_for(config.max_seq_len), capacity, device)
    indexes = maker.make(extents, [0] * slots, None)
    dtype = getattr(torch, config.dtype)
    attentions = make_attentions(config, maker.kernels, indexes, extents.device_table, dtype)
    if config.model.window_layers:
        attentions.append(ring_attention(config, maker.kernels, dtype))
    return indexes, attentions


def measured_bytes(maker: IndexMaker, capacity: int) -> int:
    """Measure the bytes of the indexes and attentions of all layers for a pool of `capacity` extents."""
    assert maker.kernels is not None, "an engine on a GPU has kernels"
    device = maker.kernels.device
    gc.collect()  # free indexes made before: those of one engine refer to each other
    before = torch.cuda.memory_allocated(device)
    made = make_without_rows(maker, capacity, maker.config.max_batch_size + 1)
    used = torch.cuda.memory_allocated(device) - before
    del made
    gc.collect()
    return used


@dataclass(frozen=True)
class GpuTraits:
    """Properties of a GPU on which the sizes of work space depend.

    Attributes
    ----------
    name : str
        Names of the GPUs that have these properties.
    capability : tuple of int
        Compute capability.
    multiprocessors : int
        Streaming multiprocessors.
    shared_memory_per_block : int
        Most bytes that a block may ask for.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int


HOPPER = GpuTraits("H100, H200", (9, 0), 132, 227 << 10)  # the SXM ones; shared memory: CUDA programming guide


class UnloadedKernels(CudaKernels):
    """Stands for the kernels of a GPU that this machine does not have: launches do nothing."""

    def __init__(self, traits: GpuTraits) -> None:
        self.device = META
        self.capability, self.multiprocessors = traits.capability, traits.multiprocessors
        self.shared_memory_per_block = traits.shared_memory_per_block

    def launch(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: the meta device holds no numbers to compute with."""


class MetaBytes(TorchFunctionMode):
    """Counts the bytes of the meta device's tensors that are made inside the `with` block and are still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[Any, int]] = {}  # of each block of memory: a weak reference to it, and its bytes

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch, and note the memory of its results; a view's memory is that of its base."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, Tensor) and tensor.device == META:
                storage = tensor.untyped_storage()
                reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made[reference.cdata] = (reference, storage.nbytes())
        return result

    @property
    def used(self) -> int:
        """Bytes in use, as torch.cuda.memory_allocated would count them."""
        sizes = [size for reference, size in self._made.values() if not reference.expired()]
        return sum(-(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES for size in sizes)


class DryRun:
    """Measures engines of one method as loading does, for a GPU that this machine does not have, or for the CPU.

    Those for the CPU are of the methods' reference classes, whose arrays are as large as the native classes'.

    Parameters
    ----------
    codebooks : dict of Tensor
        Codebooks that the builder computes for the method and the head size.
    """

    def __init__(self, codebooks: dict[str, Tensor], traits: GpuTraits = HOPPER) -> None:
        self._codebooks, self._kernels = codebooks, UnloadedKernels(traits)

    def index_needs(self, config: EngineConfig, slots: int | None = None) -> IndexNeeds:
        """Count the bytes of indexes and attentions; `slots` are those of the engine, a padding slot included, if left out.

        Raises
        ------
        ConfigError
            If the method has no index for the engine's device.
        KernelError
            If the method's kernels do not support the shape or the length.
        """
        slots = slot_count(config) if slots is None else slots
        return IndexNeeds.of(*(self.index_bytes(config, capacity, slots) for capacity in (1, 2)))

    def index_bytes(self, config: EngineConfig, capacity: int, slots: int) -> int:
        """Count the bytes of all layers' indexes and attentions for a pool of `capacity` extents.

        Layers differ only in whether they attend densely, as the first ones of some methods do (Traits.device_layers). So those
        are made with one other layer, then with two others; the difference is what each further layer takes.
        """
        own = self._ring_bytes(config)
        layers = len(config.model.row_layers)
        first = method_traits(config).device_layers + 1
        if layers <= first + 1:
            return own + self._made_bytes(config, capacity, slots, layers)
        one, two = (self._made_bytes(config, capacity, slots, number) for number in (first, first + 1))
        return own + one + (layers - first) * (two - one)

    def _ring_bytes(self, config: EngineConfig) -> int:
        """Count the bytes of the attention of layers with a sliding window, which share one."""
        if config.device != "cuda" or not config.model.window_layers:
            return 0
        count = MetaBytes()
        with count:
            made = ring_attention(config, self._kernels, getattr(torch, config.dtype))
        used = count.used
        del made
        return used

    def _made_bytes(self, config: EngineConfig, capacity: int, slots: int, layers: int) -> int:
        part = dataclasses.replace(config, model=config.model.with_row_layers(layers))
        count = MetaBytes()
        with count:
            made: Any  # kept until its tensors have been counted
            if config.device == "cuda":
                made = make_without_rows(IndexMaker(part, self._codebooks, None, self._kernels), capacity, slots)
            else:
                extents = ExtentTable(slots, extents_for(config.max_seq_len), capacity, META)
                made = IndexMaker(part, self._codebooks).make(extents, [0] * slots, None)
        used = count.used
        del made
        return used
