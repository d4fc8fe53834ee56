"""The memory of an engine on the CPU, or of one of its ranks, for `kvseek build --plan --device cpu`."""

from __future__ import annotations

import dataclasses
import math

import torch

from kvseek.builder.checkpoints.rank_weights import rank_shape
from kvseek.builder.checkpoints.weights import WeightFormat, list_weights
from kvseek.core.config import EngineConfig
from kvseek.engine.cache.memory_layout import MemoryLayout, host_rows, window_bytes
from kvseek.engine.loading.memory import IndexNeeds
from kvseek.engine.model.cpu.products import stays_quantised


def host_weight_bytes(config: EngineConfig, tp_size: int) -> int:
    """Return the bytes of the weights of one of `tp_size` ranks in memory, which may be more than in its files.

    Native kernels copy weights into oneDNN's layout, so a head that is tied to the embedding takes memory of its own, and weights
    of 8 bits that are not multiplied as they are become numbers of the engine's dtype (engine/model/cpu/products.py). Pages of
    the files that were copied are not counted, because the system drops them when it needs their memory.
    """
    native, dtype = config.kernels == "native", getattr(torch, config.dtype)
    model = dataclasses.replace(config.model, tie_word_embeddings=config.model.tie_word_embeddings and not native)
    files, size = WeightFormat.of(config), 0
    for weight in list_weights(model, quantize_lm_head=files.quantize_lm_head):
        parts = files.stored(weight)
        if files.quantises(weight.name):
            _, inputs = rank_shape(weight.name, weight.shape, model, tp_size)
            if not (native and stays_quantised(dtype, parts[0].dtype, inputs)):
                parts = WeightFormat(dtype).stored(weight)
        shapes = [rank_shape(part.name, part.shape, model, tp_size) for part in parts]
        size += sum(math.prod(shape) * part.dtype.itemsize for part, shape in zip(parts, shapes, strict=True))
    return size


def widened_bytes(config: EngineConfig, tp_size: int) -> int:
    """Return the bytes of the largest weight of one of `tp_size` ranks in float32; 0 for engines in float32.

    A processor without instructions for bfloat16 converts a weight for each product with many rows.
    """
    if config.dtype == "float32":
        return 0
    shapes = [rank_shape(weight.name, weight.shape, config.model, tp_size) for weight in list_weights(config.model)]
    return max(map(math.prod, shapes)) * torch.float32.itemsize


def host_layout(config: EngineConfig, needs: IndexNeeds, weight_bytes: int, work: int) -> MemoryLayout:
    """Lay out the memory of an engine on the CPU, all of it in host memory: what divide_measured is for a GPU.

    `work` are the bytes of the work space; `needs.fixed` is added to them.
    """
    dtype = getattr(torch, config.dtype)
    rows = host_rows(config, dtype)
    index, windows = needs.extent * rows.capacity, window_bytes(config, dtype)
    return MemoryLayout(rows, 0, weight_bytes, index, windows, work + needs.fixed)
