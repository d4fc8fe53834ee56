"""What the GPU benchmark measures on: weights, row pools full of synthetic rows, indexes built on them, decoders."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvseek.engine.config import CacheConfig, EngineConfig, ModelConfig
from kvseek.engine.model import LAST_QUERIES
from kvseek.plugins.registry import get_method

from .device_memory import (
    CHUNK_TOKENS,
    GIB,
    SLOT_STRIDE,
    Cell,
    Limits,
    Needs,
    Phase,
    cell_extents,
    fill_bytes,
    key_tokens,
    plan_phases,
)
from .random_weights import RandomWeights
from .shapes import get_shape
from .synthetic import SyntheticKeys

if TYPE_CHECKING:
    from kvseek.engine.cuda import CudaKernels
    from kvseek.engine.device_cache import DeviceCache
    from kvseek.engine.device_decoder import DeviceDecoder
    from kvseek.plugins.base import DeviceIndex

ROOM = 256  # tokens that a request may grow by: more than are timed


def engine_config(
    arguments: argparse.Namespace, model: ModelConfig, method: str, cells: Sequence[Cell]
) -> EngineConfig:
    """An engine for these cells, without budgets of memory."""
    longest = max(cell.context for cell in cells) + ROOM
    return EngineConfig(
        model,
        method,
        cache=CacheConfig(),
        dtype=arguments.dtype,
        device="cuda",
        max_batch_size=max(cell.batch for cell in cells),
        max_input_len=longest,
        max_seq_len=longest,
    )


def with_budget(config: EngineConfig, offload: str, extents: int, needs: Needs, device_layers: int) -> EngineConfig:
    """The configuration with a row pool of exactly `extents` extents, rows of `device_layers` layers on the device."""
    if offload == "auto" and device_layers in (0, config.model.num_layers):
        offload = "never" if device_layers else "always"  # a budget of nothing would not bound the pool
    layer = extents * needs.row_extent // config.model.num_layers
    host = layer * (config.model.num_layers - device_layers)
    device = layer * device_layers
    cache = dataclasses.replace(
        config.cache,
        offload=offload,
        kv_cache_host_memory_bytes=host or None,
        kv_cache_device_memory_bytes=None if offload == "always" else device or None,
    )
    return dataclasses.replace(config, cache=cache)


class Bench:
    """One GPU with random weights of a shape, and what to run on it.

    Attributes
    ----------
    methods : list of str
        Those planned for, the baseline first.
    needs : Needs
        With the largest of their indexes.
    limits : Limits
    weights : RandomWeights
    """

    def __init__(self, arguments: argparse.Namespace, cells: Sequence[Cell]) -> None:
        from kvseek.engine.cuda import cuda_device

        self.arguments, self.cells = arguments, list(cells)
        self.device = cuda_device()
        torch.cuda.set_device(self.device)
        self.dtype: torch.dtype = getattr(torch, arguments.dtype)
        self.model = get_shape(arguments.shape, max(cell.context for cell in cells) + ROOM)
        self.use(arguments.methods)
        free, _ = torch.cuda.mem_get_info(self.device)
        device = free if arguments.device_gib is None else min(free, int(arguments.device_gib * GIB))
        # Prompts are not filled in: they are computed.
        filling = 0 if arguments.prefill else fill_bytes(self.model, self.cells, self.dtype.itemsize)
        self.limits = Limits(device, int(arguments.work_gib * GIB) + filling, int(arguments.host_gib * GIB))
        self._kernels: dict[str, CudaKernels] = {}

    def use(self, methods: Sequence[str]) -> None:
        """Plan for these methods from now on."""
        self.methods = list(methods)
        every = [Needs.of(self.config(method, self.cells), self.dtype.itemsize) for method in methods]
        self.needs = max(every, key=lambda needs: needs.index_extent)

    def load(self) -> None:
        """Make the weights: after the plan has been checked, as it takes a while."""
        self.weights = RandomWeights(self.model, self.dtype, self.device, self.arguments.seed)

    def phases(self, offloads: Sequence[str], cells: Sequence[Cell] | None = None) -> list[Phase]:
        """See plan_phases; of all cells, unless some are given."""
        chosen = self.cells if cells is None else cells
        config = self.config(self.methods[0], chosen)
        return plan_phases(config, chosen, offloads, ROOM, self.needs, self.limits)

    def config(self, method: str, cells: Sequence[Cell]) -> EngineConfig:
        """An engine of a method for these cells, without budgets."""
        return engine_config(self.arguments, self.model, method, cells)

    def extents(self, cells: Sequence[Cell]) -> int:
        """Extents of the largest of the cells."""
        config = self.config(self.methods[0], cells)
        return max(cell_extents(config, cell, ROOM) for cell in cells)

    def device_layers(self, offload: str, cells: Sequence[Cell]) -> int:
        """Layers whose rows lie on the device in a pool for these cells; of "auto", as many as memory holds."""
        layers = self.model.num_layers
        if offload != "auto":
            return layers if offload == "never" else 0
        extents, most = self.extents(cells), max(cell.batch for cell in cells) + 1
        free = self.limits.device - self.limits.work_space - self.needs.weights - most * self.needs.window_slot
        left = free - extents * self.needs.index_extent
        return min(layers, max(0, left) * layers // (extents * self.needs.row_extent))

    def cache(self, offload: str, cells: Sequence[Cell]) -> DeviceCache:
        """An empty cache whose pool holds the largest of the cells; raises CapacityError."""
        from kvseek.engine.device_cache import DeviceCache

        layers, extents = self.device_layers(offload, cells), self.extents(cells)
        config = with_budget(self.config(self.methods[0], cells), offload, extents, self.needs, layers)
        on_device = extents * self.needs.row_extent // self.model.num_layers * layers
        cache = DeviceCache(config, self.dtype, self.device, on_device)
        cache.window.normal_()  # window rows that nobody wrote would be zeros, which no model has
        return cache

    def indexes(self, method: str, cache: DeviceCache, cells: Sequence[Cell]) -> list[DeviceIndex]:
        """Empty indexes of a method over a cache."""
        from kvseek.engine.loading import create_indexes, device_indexes

        config = self.config(method, cells)
        entry = get_method(method)
        books = entry.codebooks(entry.configure(config.method_config), self.model.head_dim)
        return device_indexes(create_indexes(config, cache, books, None, self.kernels(method)))

    def decoder(
        self, method: str, cache: DeviceCache, indexes: Sequence[DeviceIndex], cells: Sequence[Cell], hot_rows: bool
    ) -> DeviceDecoder:
        """A decoder of the random weights; several may share a cache and indexes."""
        from kvseek.engine.device_decoder import DeviceDecoder

        config, kernels = self.config(method, cells), self.kernels(method)
        return DeviceDecoder(config, self.weights.tensors, cache, indexes, kernels, hot_rows=hot_rows)

    def kernels(self, method: str) -> CudaKernels:
        """The method's kernels for this GPU, compiled once."""
        from kvseek.builder.compile_cuda import cached_cubin, specialise
        from kvseek.engine.cuda import CudaKernels

        if method not in self._kernels:
            major, minor = torch.cuda.get_device_capability(self.device)
            image = cached_cubin(specialise(self.config(method, self.cells)), 10 * major + minor)
            self._kernels[method] = CudaKernels(image, self.device)
        return self._kernels[method]


class Filler:
    """Fills caches and indexes with synthetic keys; every layer's are those of one text under other signs of channels."""

    def __init__(self, bench: Bench, seed: int) -> None:
        model = bench.model
        longest = key_tokens(bench.cells)
        self.source = SyntheticKeys(model.num_kv_heads, model.head_dim, bench.device, seed)
        self._keys = self.source.keys(longest, bench.dtype)
        self._values = self.source.values(min(longest, CHUNK_TOKENS), bench.dtype)
        self.signs = [self.source.signs(bench.dtype) for _ in range(model.num_layers)]
        self.queries = self.source.queries(model.num_heads, LAST_QUERIES, bench.dtype)
        self._group = model.group_size

    def keys(self, layer: int, slot: int, tokens: int, heads: slice = slice(None)) -> Tensor:
        """Keys [G, tokens, D] of a slot in a layer, of some KV heads (a copy)."""
        return self._text(slot, tokens)[heads] * self.signs[layer][heads]

    def layer_queries(self, layer: int, queries: Tensor) -> Tensor:
        """Queries [H, w, D] of the source, as those of a layer."""
        return queries * self.signs[layer].repeat_interleave(self._group, dim=0)

    @torch.inference_mode()
    def fill(self, cell: Cell, targets: Sequence[tuple[DeviceCache, Sequence[Sequence[DeviceIndex]]]]) -> None:
        """Make each cache hold the cell's requests, in slots 0, 1, ..., and build its indexes; other slots are closed.

        Every cache gets the same rows. Rows of the host pool are copied from the device in pieces of an extent.
        `device_memory.fill_bytes` counts what this holds at a time.
        """
        for cache, _ in targets:
            for slot in range(cache.padding_slot):
                cache.close(slot)
            for slot in range(cell.batch):
                cache.adopt(slot, cell.context, room=ROOM)
        for layer in range(len(self.signs)):
            with self._turned(layer):
                for slot in range(cell.batch):
                    self._fill_slot(layer, slot, targets)
        torch.cuda.synchronize()

    def _fill_slot(
        self, layer: int, slot: int, targets: Sequence[tuple[DeviceCache, Sequence[Sequence[DeviceIndex]]]]
    ) -> None:
        keys, queries = self._text(slot, targets[0][0].lengths[slot]), self.layer_queries(layer, self.queries)
        for start in range(0, keys.shape[1], CHUNK_TOKENS):
            part = keys[:, start : start + CHUNK_TOKENS]
            rows = torch.stack((part, self._values[:, : part.shape[1]]), dim=2)
            for cache, _ in targets:
                cache.write_rows(layer, slot, start, rows)
        for _, index_sets in targets:
            for indexes in index_sets:
                indexes[layer].build(slot, keys, queries)

    def _text(self, slot: int, tokens: int) -> Tensor:
        start = slot * SLOT_STRIDE
        return self._keys[:, start : start + tokens]

    @contextmanager
    def _turned(self, layer: int) -> Iterator[None]:
        """Make the keys those of a layer, in place: a copy would take gigabytes. Twice ±1 changes no bit."""
        self._keys.mul_(self.signs[layer])
        try:
            yield
        finally:
            self._keys.mul_(self.signs[layer])
