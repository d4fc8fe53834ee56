"""Divides a GPU's memory when an engine is loaded, after measuring what its indexes and attentions take (docs/memory.md)."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from kvseek.core.config import EXTENT_TOKENS, EngineConfig
from kvseek.core.extents import ExtentTable, extents_for
from kvseek.engine.cache.memory_layout import Footprint, MemoryLayout, divide_memory
from kvseek.engine.model.activation_memory import work_bytes
from kvseek.engine.parallel.cuda.ranks import DeviceRanks
from kvseek.kernels.cuda.attention.attend import DeviceAttention
from kvseek.plugins.contract import Index

from .indexes import IndexMaker, make_attentions


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
        index_bytes_per_token=needs.extent / config.model.num_layers / EXTENT_TOKENS,
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
    attentions = make_attentions(config, maker.kernels, indexes, extents.device_table, getattr(torch, config.dtype))
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
