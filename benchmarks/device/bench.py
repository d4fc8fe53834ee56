"""What the GPU benchmark measures on: weights, caches over row pools, indexes, decoders, and what they need."""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvseek.core.config import EngineConfig, ModelConfig
from kvseek.measurement.variants import Variant

from .filling import Filler
from .memory_plan import GIB, Cell, IndexNeeds, Limits, Needs, Phase, cell_extents, fill_bytes, plan_phases
from .random_weights import RandomWeights, quantised
from kvseek.benchmarks.shapes import get_shape

if TYPE_CHECKING:
    from kvseek.core.cpu_library import CpuLibrary
    from kvseek.core.cuda import CudaKernels
    from kvseek.engine.cache.cache import Cache
    from kvseek.engine.model.torch_model.device_decoder import DeviceDecoder
    from kvseek.plugins.contract import DeviceIndex

ROOM = 256  # tokens that a request may grow by: more than are timed


def engine_config(dtype: str, model: ModelConfig, variant: Variant, cells: Sequence[Cell]) -> EngineConfig:
    """An engine for these cells, without budgets of memory."""
    longest = max(cell.context for cell in cells) + ROOM
    return EngineConfig(
        model,
        variant.method,
        variant.fields,
        cache=variant.cache,
        dtype=dtype,
        device="cuda",
        weight_only_precision=variant.weight_only_precision,
        max_batch_size=max(cell.batch for cell in cells),
        max_input_len=longest,
        max_seq_len=longest,
    )


def with_budget(config: EngineConfig, offload: str, extents: int, row_extent: int, device_layers: int) -> EngineConfig:
    """The configuration with a row pool of exactly `extents` extents, rows of `device_layers` layers on the device.

    `row_extent` is the bytes of an extent's rows in all layers.
    """
    if offload == "auto" and device_layers in (0, config.model.num_layers):
        offload = "never" if device_layers else "always"  # a budget of nothing would not bound the pool
    layer = extents * row_extent // config.model.num_layers
    host = layer * (config.model.num_layers - device_layers)
    device = layer * device_layers
    cache = dataclasses.replace(
        config.cache,
        offload=offload,
        kv_cache_host_memory_bytes=host or None,
        kv_cache_device_memory_bytes=None if offload == "always" else device or None,
    )
    return dataclasses.replace(config, cache=cache)


def lay_out(cache: DeviceCache, config: EngineConfig) -> None:
    """See DeviceCache.lay_out; fills the windows."""
    cache.lay_out(config)
    cache.window.normal_()  # window rows that nobody wrote would be zeros, which no model has


def measured_needs(bench: Bench, variant: Variant) -> IndexNeeds:
    """What a variant's indexes and attentions allocate, its rows in host memory, by making them three times."""
    one, extent, slot = (bench.allocated(variant, *sizes) for sizes in ((1, 1), (2, 1), (1, 2)))
    per_extent, per_slot = max(0, extent - one), max(0, slot - one)
    return IndexNeeds(per_extent, per_slot, max(0, one - per_extent - 2 * per_slot))  # 2 slots: one is for padding


class Bench:
    """One GPU with random weights of a shape, and what to run on it.

    Attributes
    ----------
    variants : list of Variant
        Those planned for, the baseline first.
    needs : Needs
        Enough for any of them.
    limits : Limits
    weights : RandomWeights
    """

    def __init__(self, arguments: argparse.Namespace, cells: Sequence[Cell], layers: int | None = None) -> None:
        """Measure what the variants need and plan for them; `layers` cuts the shape to its first ones."""
        from kvseek.core.cuda import cuda_device

        self.arguments, self.cells = arguments, list(cells)
        self.device = cuda_device()
        torch.cuda.set_device(self.device)
        self.dtype: torch.dtype = getattr(torch, arguments.dtype)
        shape = get_shape(arguments.shape, max(cell.context for cell in cells) + ROOM)
        self.model = dataclasses.replace(shape, num_layers=layers or shape.num_layers)
        self._kernels: dict[str, CudaKernels] = {}
        self._library: CpuLibrary | None = None
        self._needs: dict[str, IndexNeeds] = {}
        self.use(arguments.methods)
        free, _ = torch.cuda.mem_get_info(self.device)
        device = free if arguments.device_gib is None else min(free, int(arguments.device_gib * GIB))
        # Prompts are not filled in: they are computed.
        filling = 0 if arguments.prefill else fill_bytes(self.model, self.cells, self.dtype.itemsize)
        self.limits = Limits(device, int(arguments.work_gib * GIB) + filling, int(arguments.host_gib * GIB))

    def use(self, variants: Sequence[Variant]) -> None:
        """Plan for these variants from now on."""
        self.variants = list(variants)
        for variant in variants:
            if variant.label not in self._needs:
                self._needs[variant.label] = measured_needs(self, variant)
        itemsize = self.dtype.itemsize
        every = [Needs.of(self.config(v, self.cells), itemsize, self._needs[v.label]) for v in variants]
        self.needs = Needs.most(every)
        # With "always", the first layers of all variants that share a pool lie where one of them wants its dense ones.
        self.dense_layers = max(v.entry.dense_layers(v.settings) for v in variants)
        self.region_cache = min((v.cache for v in variants), key=lambda cache: cache.sink + cache.local)

    def load(self) -> None:
        """Make the weights: after the plan has been checked, as it takes a while."""
        self.weights = RandomWeights(self.model, self.dtype, self.device, self.arguments.seed)
        precisions = {variant.weight_only_precision for variant in self.variants}
        self._tensors = {precision: quantised(self.weights.tensors, precision) for precision in precisions}

    def filler(self) -> Filler:
        """Synthetic keys for all cells; makes them."""
        return Filler(self.model, self.cells, self.dtype, self.device, self.arguments.seed, ROOM)

    def phases(self, offloads: Sequence[str], cells: Sequence[Cell] | None = None) -> list[Phase]:
        """See plan_phases; of all cells, unless some are given."""
        chosen = self.cells if cells is None else cells
        share = self.dense_layers / self.model.num_layers
        return plan_phases(self.region_cache, chosen, offloads, ROOM, self.needs, self.limits, share)

    def config(self, variant: Variant, cells: Sequence[Cell]) -> EngineConfig:
        """An engine of a variant for these cells, without budgets."""
        return engine_config(self.arguments.dtype, self.model, variant, cells)

    def extents(self, cells: Sequence[Cell]) -> int:
        """Extents of the largest of the cells, whatever the variant's windows."""
        return max(cell_extents(self.region_cache, cell, ROOM) for cell in cells)

    def device_layers(self, offload: str, cells: Sequence[Cell]) -> int:
        """Layers whose rows lie on the device in a pool for these cells; of "auto", as many as memory holds."""
        layers = self.model.num_layers
        if offload != "auto":
            return layers if offload == "never" else min(layers, self.dense_layers)
        extents, most = self.extents(cells), max(cell.batch for cell in cells) + 1
        free = self.limits.device - self.limits.work_space - self.needs.weights - most * self.needs.window_slot
        left = free - self.needs.index.of(extents, most)
        return min(layers, max(0, left) * layers // (extents * self.needs.row_extent))

    def cache(self, offload: str, cells: Sequence[Cell]) -> DeviceCache:
        """An empty cache whose pool holds the largest of the cells, laid out for the baseline; raises CapacityError."""
        from kvseek.engine.cache.cache import Cache

        layers, extents = self.device_layers(offload, cells), self.extents(cells)
        row_extent = self.needs.row_extent
        if offload == "always" and layers:
            offload = "auto"  # the budgets say that the dense layers' rows lie on the device
        config = with_budget(self.config(self.variants[0], cells), offload, extents, row_extent, layers)
        cache = DeviceCache(config, self.dtype, self.device, extents * row_extent // self.model.num_layers * layers)
        cache.window.normal_()
        return cache

    def indexes(self, variant: Variant, cache: DeviceCache, cells: Sequence[Cell]) -> list[DeviceIndex]:
        """Empty indexes of a variant over a cache."""
        from kvseek.engine.loading.load import create_indexes, device_indexes, needs_cpu_library

        config = self.config(variant, cells)
        books = variant.entry.codebooks(variant.settings, self.model.head_dim)
        library = self.library() if needs_cpu_library(config) else None
        return device_indexes(create_indexes(config, cache, books, library, self.kernels(variant)))

    def decoder(
        self,
        variant: Variant,
        cache: DeviceCache,
        indexes: Sequence[DeviceIndex],
        cells: Sequence[Cell],
        hot_rows: bool,
    ) -> DeviceDecoder:
        """A decoder of the random weights; several may share a cache and indexes."""
        from kvseek.engine.model.torch_model.device_decoder import DeviceDecoder

        config, kernels = self.config(variant, cells), self.kernels(variant)
        tensors = self._tensors[variant.weight_only_precision]
        return DeviceDecoder(config, tensors, cache, indexes, kernels, hot_rows=hot_rows)

    def allocated(self, variant: Variant, extents: int, batch: int) -> int:
        """Device bytes of a variant's indexes and attentions over a pool of `extents` extents in host memory."""
        from kvseek.engine.cache.cache import Cache
        from kvseek.engine.model.torch_model.graphed_decoder import make_attentions

        cells = [Cell(max(cell.context for cell in self.cells), batch)]
        config = self.config(variant, cells)
        row_extent = Needs.of(config, self.dtype.itemsize, IndexNeeds()).row_extent
        cache = DeviceCache(with_budget(config, "always", extents, row_extent, 0), self.dtype, self.device, None)
        gc.collect()  # indexes of one engine refer to each other
        before = torch.cuda.memory_allocated(self.device)
        indexes = self.indexes(variant, cache, cells)
        table, hot_from = cache.extents.device_table, self.model.num_layers * (self.arguments.hot_rows == "off")
        attentions = make_attentions(config, self.kernels(variant), indexes, table, self.dtype, hot_from)
        used = torch.cuda.memory_allocated(self.device) - before
        del indexes, attentions, cache
        gc.collect()
        torch.cuda.empty_cache()
        return used

    def kernels(self, variant: Variant) -> CudaKernels:
        """The variant's kernels for this GPU, compiled once."""
        from kvseek.builder.compile.cuda import cached_cubin, specialise
        from kvseek.core.cuda import CudaKernels

        if variant.label not in self._kernels:
            major, minor = torch.cuda.get_device_capability(self.device)
            image = cached_cubin(specialise(self.config(variant, self.cells)), 10 * major + minor)
            self._kernels[variant.label] = CudaKernels(image, self.device)
        return self._kernels[variant.label]

    def library(self) -> CpuLibrary:
        """Compiled code of the CPU, compiled once."""
        from kvseek.builder.compile.cpu import cached_cpu_library
        from kvseek.core.cpu_library import CpuLibrary

        self._library = self._library or CpuLibrary(cached_cpu_library())
        return self._library
