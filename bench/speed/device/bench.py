"""What the GPU benchmark measures on: random weights, row pools and caches over them, indexes, decoders, and what they need."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.bench.methods import load_kernels
from kvseek.bench.speed.device.filling import Filler
from kvseek.bench.speed.device.memory_plan import (
    Cell,
    IndexNeeds,
    Limits,
    Needs,
    Phase,
    cell_extents,
    fill_bytes,
    plan_phases,
)
from kvseek.bench.speed.shapes import get_shape
from kvseek.bench.variants import Variant, WeightForm
from kvseek.core.config import EngineConfig
from kvseek.core.errors import require
from kvseek.core.model_config import ModelConfig
from kvseek.engine.cache.cache import Cache
from kvseek.engine.cache.memory_layout import RowLayout, layer_extent_bytes
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.loading.indexes import IndexMaker, device_retrieval
from kvseek.engine.loading.memory import measured_bytes
from kvseek.engine.loading.runtime import device_products
from kvseek.engine.loading.supported import needs_cpu_library
from kvseek.engine.model.cuda.steps import GraphDecoder, KernelModel, layer_kernels, prompt_attention
from kvseek.engine.model.weights import make_weights
from kvseek.engine.retrieval import Retrieval
from kvseek.plugins.contract import Index

if TYPE_CHECKING:
    from kvseek.core.cpu_library import CpuLibrary
    from kvseek.core.cuda import CudaKernels

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
        **variant.engine,
        max_batch_size=max(cell.batch for cell in cells),
        max_input_len=longest,
        max_seq_len=longest,
    )


class BenchDecoder(GraphDecoder):
    """A decoder on a GPU whose graphs and kernels the benchmark launches itself."""

    model: KernelModel


def measured_needs(bench: Bench, variant: Variant) -> IndexNeeds:
    """What a variant's indexes and attentions allocate, its rows in host memory, by making them three times as loading does."""
    longest = max(cell.context for cell in bench.cells)
    one, extent, slot = (
        measured_bytes(bench.index_maker(variant, [Cell(longest, batch)]), extents)
        for extents, batch in ((1, 1), (2, 1), (1, 2))
    )
    torch.cuda.empty_cache()
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
    """

    def __init__(self, arguments: argparse.Namespace, cells: Sequence[Cell], *, layers: int | None = None) -> None:
        """Measure what the variants need and plan for them; `layers`: of the model, instead of all of the shape's."""
        from kvseek.core.cuda import cuda_device

        self.arguments, self.cells = arguments, list(cells)
        self.device = cuda_device()
        torch.cuda.set_device(self.device)
        self.dtype: torch.dtype = getattr(torch, arguments.dtype)
        self.model = get_shape(arguments.shape, max(cell.context for cell in cells) + ROOM)
        self.model = self.model.first_layers(layers or self.model.num_layers)
        self._kernels: dict[str, CudaKernels] = {}
        self._library: CpuLibrary | None = None
        self._needs: dict[str, IndexNeeds] = {}
        self._tensors: dict[WeightForm, dict[str, Tensor]] = {}
        self.use(arguments.methods)
        free, _ = torch.cuda.mem_get_info(self.device)
        device = free if arguments.gpu_memory is None else min(free, arguments.gpu_memory)
        # Prompts are not filled in: they are computed.
        filling = 0 if arguments.prefill else fill_bytes(self.model, self.cells, self.dtype.itemsize)
        self.limits = Limits(device, arguments.work_memory + filling, arguments.host_memory)

    def use(self, variants: Sequence[Variant]) -> None:
        """Plan for these variants from now on."""
        self.variants = list(variants)
        types = {variant.cache.row_dtype for variant in variants}
        require(len(types) == 1, "cache.row_dtype", sorted(types), "one of all methods", "they share a pool: run twice")
        for variant in variants:
            if variant.label not in self._needs:
                self._needs[variant.label] = measured_needs(self, variant)
        itemsize = self.dtype.itemsize
        every = [Needs.of(self.config(v, self.cells), itemsize, self._needs[v.label]) for v in variants]
        self.needs = Needs.most(every)
        # With "always", the rows of dense layers stay on the device. Variants share one pool, so the largest number of dense
        # layers counts for all of them.
        self.dense_layers = max(v.entry.traits(v.settings).device_layers for v in variants)
        self.region_cache = min((v.cache for v in variants), key=lambda cache: cache.sink + cache.local)

    def load(self) -> None:
        """Make the random weights of the variants in use: after the plan has been checked, as it takes a while."""
        self._tensors.clear()
        for variant in self.variants:
            if variant.weights not in self._tensors:
                config = self.config(variant, self.cells)
                self._tensors[variant.weights] = make_weights(config, self.device, self.arguments.seed)

    def tensors(self, variant: Variant) -> dict[str, Tensor]:
        """A variant's weights, as its engine stores them."""
        return self._tensors[variant.weights]

    def load_alone(self, variant: Variant) -> None:
        """Plan for one variant from now on, and hold its weights alone."""
        self.use([variant])
        self.load()

    def filler(self) -> Filler:
        """Synthetic keys for all cells; makes them."""
        return Filler(self.model, self.cells, self.dtype, self.device, self.arguments.seed, ROOM)

    def phases(self, offloads: Sequence[str], cells: Sequence[Cell] | None = None) -> list[Phase]:
        """See plan_phases; of all cells, unless some are given."""
        chosen = self.cells if cells is None else cells
        share = self.dense_layers / len(self.model.row_layers)
        return plan_phases(self.region_cache, chosen, offloads, ROOM, self.needs, self.limits, share)

    def config(self, variant: Variant, cells: Sequence[Cell]) -> EngineConfig:
        """An engine of a variant for these cells, without budgets."""
        return engine_config(self.arguments.dtype, self.model, variant, cells)

    def extents(self, cells: Sequence[Cell]) -> int:
        """Extents of the largest of the cells, whatever the variant's windows."""
        return max(cell_extents(self.region_cache, cell, ROOM) for cell in cells)

    def device_layers(self, offload: str, cells: Sequence[Cell]) -> int:
        """Layers whose rows lie on the device in a pool for these cells; of "auto", as many as memory holds."""
        layers = len(self.model.row_layers)
        if offload != "auto":
            return layers if offload == "never" else min(layers, self.dense_layers)
        extents, most = self.extents(cells), max(cell.batch for cell in cells) + 1
        free = self.limits.device - self.limits.work_space - self.needs.weights - most * self.needs.window_slot
        left = free - self.needs.index.of(extents, most)
        return min(layers, max(0, left) * layers // (extents * self.needs.row_extent))

    def row_storage(self, offload: str, cells: Sequence[Cell]) -> RowStorage:
        """Rows for the largest of the cells, whatever the method: pinning memory takes long. Raises CapacityError."""
        config, on_device = self.config(self.variants[0], cells), self.device_layers(offload, cells)
        layer_bytes = layer_extent_bytes(config, self.dtype)
        layout = RowLayout(self.extents(cells), on_device, len(self.model.row_layers) - on_device, layer_bytes)
        return RowStorage(config, self.dtype, self.device, layout)

    def new_cache(self, rows: RowStorage, variant: Variant, cells: Sequence[Cell]) -> Cache:
        """An empty cache with a variant's windows over rows that no other cache uses any more; raises CapacityError."""
        cache = Cache(self.config(variant, cells), self.dtype, self.device, rows)
        cache.window.normal_()  # window rows that nobody wrote would be zeros, which no model has
        return cache

    def indexes(self, variant: Variant, cache: Cache, cells: Sequence[Cell]) -> list[Index]:
        """Empty indexes of a variant over a cache."""
        return self.index_maker(variant, cells).over(cache)

    def retrieval(
        self, variant: Variant, cache: Cache, indexes: list[Index], cells: Sequence[Cell], hot_rows: bool
    ) -> Retrieval:
        """Retrieval of a variant; several may share a cache and indexes."""
        config = self.config(variant, cells)
        return device_retrieval(config, cache, indexes, self.kernels(variant), hot_rows=hot_rows)

    def decoder(
        self, variant: Variant, cache: Cache, indexes: list[Index], cells: Sequence[Cell], hot_rows: bool
    ) -> BenchDecoder:
        """A decoder of the random weights; several may share a cache and indexes."""
        retrieval, kernels = self.retrieval(variant, cache, indexes, cells, hot_rows), self.kernels(variant)
        tensors = self.tensors(variant)
        attention, products = prompt_attention(retrieval, kernels), device_products(retrieval.config, kernels)
        model = KernelModel(tensors, retrieval, layer_kernels(retrieval, kernels), attention, products)
        return BenchDecoder(model, retrieval)

    def index_maker(self, variant: Variant, cells: Sequence[Cell]) -> IndexMaker:
        """What makes a variant's indexes for these cells."""
        config = self.config(variant, cells)
        codebooks = variant.entry.traits(variant.settings).codebooks(self.model.head_dim)
        library = self.library() if needs_cpu_library(config) else None
        return IndexMaker(config, codebooks, library, self.kernels(variant))

    def kernels(self, variant: Variant) -> CudaKernels:
        """The variant's kernels for this GPU, compiled once."""
        from kvseek.builder.compile.cuda import specialise

        if variant.label not in self._kernels:
            unit = specialise(self.config(variant, self.cells))
            self._kernels[variant.label] = load_kernels(unit, self.device)
        return self._kernels[variant.label]

    def library(self) -> CpuLibrary:
        """Compiled code of the CPU, compiled once."""
        from kvseek.builder.compile.cpu import cached_cpu_library
        from kvseek.core.cpu_library import CpuLibrary

        self._library = self._library or CpuLibrary(cached_cpu_library())
        return self._library
