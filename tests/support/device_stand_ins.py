"""The GPU's decoder without a GPU: PyTorch in place of its kernels, on the addresses that they would read."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvseek.core.config import EngineConfig, ModelConfig
from kvseek.core.config_file import read_config
from kvseek.engine.loading.load import create_indexes
from kvseek.engine.model import layer_kernels
from kvseek.engine.model.layer_kernels import LayerKernels
from kvseek.engine.model.rope import rotate
from kvseek.engine.model.torch_model.device_decoder import DeviceDecoder
from kvseek.engine.model.weights import load_weights
from kvseek.engine.schedule.sampling import greedy_token
from kvseek.plugins.attention.host import attend_reference
from kvseek.plugins.batch import DeviceBatch, LayerCache
from kvseek.plugins.contract import DeviceIndex, IndexContext
from kvseek.plugins.flat.method import FlatIndex
from kvseek.plugins.full.device import DeviceFullIndex
from kvseek.plugins.selection import DeviceSelection, Selection

CPU = torch.device("cpu")


class TorchLayer(LayerKernels):
    """What layer.cu computes, in PyTorch."""

    def __init__(self, kernels: Any, model: ModelConfig, dtype: torch.dtype, device: torch.device, batch: int) -> None:
        super().__init__(kernels, model, dtype, device, batch)

    def step_begin(self, batch: DeviceBatch, embed: Tensor) -> tuple[Tensor, layer_kernels.Rotation]:
        positions = batch.requests[:, 2].tolist()
        parts = [self.rotation(position, position + 1) for position in positions]
        return embed[batch.requests[:, 0].long()], (torch.cat([c for c, _ in parts]), torch.cat([s for _, s in parts]))

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        if delta is not None:
            x += delta
        return F.rms_norm(x, (x.shape[1],), weight, self.model.rms_norm_eps)

    def split(self, qkv: Tensor, rotation: layer_kernels.Rotation, *norms: Tensor | None) -> tuple[Tensor, ...]:
        model, size = self.model, self.model.head_dim
        parts = qkv.view(qkv.shape[0], -1, size).split([model.num_heads, model.num_kv_heads, model.num_kv_heads], 1)
        cos, sin = (torch.cat((part, part), dim=-1)[:, None] for part in rotation)
        q, k = (
            rotate(x if norm is None else F.rms_norm(x, (size,), norm, model.rms_norm_eps), cos, sin)
            for x, norm in zip(parts[:2], norms, strict=True)
        )
        return q, k, parts[2]

    def rope_append(
        self,
        qkv: Tensor,
        batch: DeviceBatch,
        rotation: layer_kernels.Rotation,
        window: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        q, k, v = self.split(qkv, rotation, q_norm, k_norm)
        for request, (slot, row) in enumerate(batch.requests[:, [1, 3]].tolist()):
            window[slot, :, row] = torch.stack((k[request], v[request]), dim=1)
        return q

    def append(self, keys: Tensor, values: Tensor, batch: DeviceBatch, window: Tensor) -> None:
        for request, (slot, row) in enumerate(batch.requests[:, [1, 3]].tolist()):
            window[slot, :, row] = torch.stack((keys[request], values[request]), dim=1)

    def rope_prompt(
        self,
        qkv: Tensor,
        rotation: layer_kernels.Rotation,
        keys: Tensor,
        values: Tensor,
        start: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        q, k, v = self.split(qkv, rotation, q_norm, k_norm)
        keys[:, start : start + len(k)], values[:, start : start + len(v)] = k.transpose(0, 1), v.transpose(0, 1)
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def argmax(self, logits: Tensor) -> Tensor:
        return torch.tensor([greedy_token(row) for row in logits], dtype=torch.int32)


class TorchAttention:
    """What attend.cu computes, from the same addresses. It reads rows of the pool though the method's store holds them."""

    def __init__(self, kernels: Any, **options: Any) -> None:
        self.options, self.scratch, self.forgotten = options, options["scratch"] or object(), 0

    def forget(self, slot: int) -> None:
        self.forgotten += 1

    def launch(
        self,
        queries: Tensor,
        batch: DeviceBatch,
        window: Tensor,
        rows_pointer: int,
        extent_stride: int,
        selection: DeviceSelection | None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        on_host: bool = False,
    ) -> Tensor:
        assert queries.is_contiguous()
        assert lse is None, "attend_reference keeps it to itself"
        heads, size = self.options["kv_heads"], self.options["head_dim"]
        extents = int(batch.table.max()) + 1
        numbers = extent_stride * (extents - 1) + heads * 1024 * 2 * size if extents else 0
        memory = (ctypes.c_float * numbers).from_address(rows_pointer) if numbers else (ctypes.c_float * 1)()
        flat = torch.frombuffer(memory, dtype=torch.float32)
        strides = (extent_stride, 1024 * 2 * size, 2 * size, size, 1)
        rows = flat.as_strided((extents, heads, 1024, 2, size), strides)
        outputs = []
        for request, fields in enumerate(batch.requests.tolist()):
            _, slot, _, _, sink_rows, first, ring_rows, length, dense = fields[:9]
            view = LayerCache(
                [slot],
                window,
                torch.tensor([[sink_rows, first, ring_rows]]),
                rows,
                batch.table,
                torch.tensor([length]),
                self.options["sink"],
            )
            everything = Selection.everything([length], heads, CPU)
            chosen = everything if dense or selection is None else Selection(selection.rows[request, None], 1, (0,))
            outputs.append(attend_reference(queries[request, None], chosen, view, self.options["scaling"]))
        result = torch.cat(outputs)
        return result if out is None else out.copy_(result)


class DeviceFlat(DeviceIndex):
    """Exact top-k as a device index; a staged key is NaN in what selections see until it is committed."""

    def __init__(self, context: IndexContext) -> None:
        super().__init__(context)
        self.flat = FlatIndex(context)
        self.top_k = context.config.top_k

    def build(self, slot: int, keys: Tensor, queries: Tensor) -> None:
        self.flat.build(slot, keys, queries)

    def plan(self, length: int) -> tuple[int, ...]:
        return (length, self.top_k)

    def attended(self, length: int) -> int:
        return min(length, self.top_k)

    def launch_select(self, queries: Tensor, batch: DeviceBatch) -> DeviceSelection:
        rows = torch.full((batch.size, self.context.num_kv_heads, self.top_k), 1 << 20, dtype=torch.int32)
        for request, fields in enumerate(batch.requests.tolist()):
            if not fields[8]:
                assert fields[7] == self.context.lengths[fields[1]] == fields[9]
                rows[request] = self.flat.select(queries[request, None], [fields[1]]).rows[0]
        return DeviceSelection(rows)

    def stage(self, slot: int, start: int, keys: Tensor) -> None:
        self.context.extents.write(self.flat.keys, slot, start, keys)

    def commit(self, slot: int, start: int, count: int) -> None:
        assert self.context.lengths[slot] == start + count

    @property
    def bytes_per_token(self) -> float:
        return self.flat.bytes_per_token


INDEXES: dict[str, type[DeviceIndex]] = {"full": DeviceFullIndex, "flat": DeviceFlat}


def make_parts(
    directory: Path, offload: str = "always", **changes: Any
) -> tuple[EngineConfig, DeviceCache, list[DeviceIndex]]:
    """Configuration of a CPU engine as one of a GPU with `changes`, and a cache and indexes for it."""
    config = read_config(directory)
    cache_config = dataclasses.replace(config.cache, offload=offload)
    config = dataclasses.replace(config, device="cuda", kernels="native", cache=cache_config, **changes)
    cache = DeviceCache(config, torch.float32, CPU, None)
    contexts = [index.context for index in create_indexes(config, cache, {}, None)]
    indexes = [INDEXES[config.method](context) for context in contexts]
    for layer, index in enumerate(indexes):
        index.bind(cache.rows_of(layer))
    return config, cache, indexes


def make_decoder(directory: Path, offload: str = "always") -> DeviceDecoder:
    """A DeviceDecoder over the weights of a CPU engine."""
    config, cache, indexes = make_parts(directory, offload)
    weights = load_weights(directory, CPU)
    return DeviceDecoder(config, weights, cache, indexes, None, graphs=False)  # type: ignore[arg-type]
