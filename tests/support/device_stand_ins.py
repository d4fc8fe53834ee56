"""The GPU's decoder without a GPU: PyTorch in place of its kernels, and no graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.support.draws import make_draws
from torch import Tensor

from kvseek.core.batch import Batch, Selection, buckets_for
from kvseek.core.config import EngineConfig, read_config
from kvseek.core.index_context import IndexContext
from kvseek.core.model_config import ModelConfig
from kvseek.core.ranks import rank_config
from kvseek.core.rope import Rotation
from kvseek.engine.cache.cache import EVICT_AHEAD, Cache
from kvseek.engine.cache.memory_layout import lay_out_rows
from kvseek.engine.cache.reuse import reuses_prefixes
from kvseek.engine.cache.row_storage import RowStorage
from kvseek.engine.draws.sampling import greedy_token
from kvseek.engine.loading.indexes import host_retrieval
from kvseek.engine.model.cuda.steps import GraphDecoder, KernelModel
from kvseek.engine.model.decoder import Decoder
from kvseek.engine.model.layer import Products
from kvseek.engine.model.library_attention import causal_attention_device
from kvseek.engine.model.reference import TorchOperations
from kvseek.engine.model.weights import load_weights
from kvseek.engine.parallel.ranks import RankProducts, Ranks
from kvseek.engine.retrieval import Retrieval
from kvseek.kernels.cuda.layer.layer import LayerKernels
from kvseek.plugins.contract import Budget, Index
from kvseek.plugins.flat.method import FlatIndex
from kvseek.plugins.full.method import FullIndex
from kvseek.plugins.prkv.reference import ReferenceIndex
from kvseek.plugins.registry import get_method

CPU = torch.device("cpu")
UNDEFINED = 1 << 20  # what a GPU's selection may hold for a request that is dense


class TorchLayer(TorchOperations, LayerKernels):
    """What layer.cu computes, in PyTorch."""

    def __init__(self, model: ModelConfig, max_batch: int) -> None:
        kernels: Any = None
        LayerKernels.__init__(self, kernels, model, torch.float32, CPU, max_batch)

    def step_begin(self, batch: Batch, embed: Tensor, first: int = 0) -> tuple[Tensor, Rotation]:
        parts = [self.rotation(position, position + 1, position + 1) for position in batch.column("position").tolist()]
        rotation = torch.cat([cosines for cosines, _ in parts]), torch.cat([sines for _, sines in parts])
        assert batch.latest is not None, "as on a GPU"
        tokens = batch.column("token").long()
        tokens = torch.where(tokens < 0, batch.latest[batch.slots].long(), tokens)
        own = tokens - first
        held = (own >= 0) & (own < embed.shape[0])
        return embed[own * held] * held[:, None], rotation

    def append(self, keys: Tensor, values: Tensor, batch: Batch, window: Tensor) -> None:
        for request, (slot, row) in enumerate(zip(batch.slots, batch.column("write_row").tolist(), strict=True)):
            window[slot, :, row] = torch.stack((keys[request], values[request]), dim=1)

    def argmax(self, logits: Tensor, step: Batch | None = None) -> Tensor:
        tokens = torch.tensor([greedy_token(row) for row in logits], dtype=torch.int32)
        if step is not None and step.latest is not None:
            step.latest[step.slots] = tokens
        return tokens


class SelectedRows(FlatIndex):
    """Exact top-k as an index of a GPU may do it: it reads numbers of the batch, and skips requests that are dense."""

    def budget(self, length: int) -> Budget:
        return Budget(min(self.config.top_k, length), (length, self.config.top_k))

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        shape = (batch.size, self.context.num_kv_heads, self.config.top_k)
        rows = torch.full(shape, UNDEFINED, dtype=torch.int32)
        for request, fields in enumerate(batch.requests.tolist()):
            if not fields[8]:
                assert fields[7] == self.context.lengths[fields[1]] == fields[9]
                rows[request] = super().select(queries[request, None], batch.subset([request])).rows[0]
        return Selection(rows)


class SelectedPages(ReferenceIndex):
    """PRKV as an index of a GPU does it: it skips requests that are dense."""

    def select(self, queries: Tensor, batch: Batch) -> Selection:
        shape = (batch.size, self.context.num_kv_heads, self.config.top_k)
        rows = torch.full(shape, UNDEFINED, dtype=torch.int32)
        for request, fields in enumerate(batch.requests.tolist()):
            if not fields[8]:
                rows[request] = super().select(queries[request, None], batch.subset([request])).rows[0]
        return Selection(rows)


INDEXES: dict[str, Callable[[IndexContext], Index]] = {
    "full": FullIndex,
    "flat": SelectedRows,
    "prkv": SelectedPages,
}


def make_retrieval(directory: Path, offload: str = "always", **changes: Any) -> Retrieval:
    """Retrieval of a CPU engine's method over the cache of a GPU engine, whose configuration gets `changes`."""
    config = gpu_config(rank_config(read_config(directory)), offload, **changes)
    rows = RowStorage(config, torch.float32, CPU, lay_out_rows(config, torch.float32, None))
    cache = Cache(config, torch.float32, CPU, rows)
    cache.evict_ahead = min(EVICT_AHEAD, config.cache.update, config.cache.local)  # as on a GPU
    cache.load_ahead = True
    return host_retrieval(config, cache, make_indexes(config, cache), None)


def gpu_config(config: EngineConfig, offload: str, **changes: Any) -> EngineConfig:
    """A CPU engine's configuration as one of a GPU. Its cache has the offload, and then the changes."""
    cache = dataclasses.replace(changes.pop("cache", config.cache), offload=offload)
    return dataclasses.replace(config, device="cuda", kernels="native", cache=cache, **changes)


def make_indexes(config: EngineConfig, cache: Cache) -> list[Index]:
    """Indexes of all layers, on the CPU."""
    model, method = config.model, get_method(config.method)
    settings = method.configure(config.method_config)
    return [
        INDEXES[config.method](
            IndexContext(
                layer=layer,
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                scaling=model.head_dim**-0.5,
                config=settings,
                codebooks=method.traits(settings).codebooks(model.head_dim),
                extents=cache.extents,
                lengths=cache.lengths,
                dtype=torch.float32,
                device=CPU,
                rows=cache.rows.of_layer(layer),
                reuses_prefixes=reuses_prefixes(config),
            )
        )
        for layer in range(len(model.row_layers))
    ]


def layer_ops(retrieval: Retrieval) -> TorchLayer:
    """Of a size that holds the largest batch."""
    return TorchLayer(retrieval.config.model, buckets_for(retrieval.config.max_batch_size)[-1])


def make_decoder(directory: Path, offload: str = "always", ranks: Ranks | None = None, **changes: Any) -> Decoder:
    """A GPU's decoder over the weights of a CPU engine, or a rank's over its part."""
    retrieval = make_retrieval(directory, offload, **changes)
    weights, products = load_weights(directory, CPU, rank=0 if ranks is None else ranks.rank), Products(torch.float32)
    if ranks is not None:
        products = RankProducts(products, ranks, retrieval.config.model.vocab_size)
    model = KernelModel(weights, retrieval, layer_ops(retrieval), causal_attention_device, products)
    if retrieval.config.cache.cached_prefill == "sparse":
        model.reader = GraphDecoder(model, retrieval, graphs=False)
    return GraphDecoder(model, retrieval, make_draws("native"), graphs=False)
