"""Device memory that an engine needs beside weights, index, windows and rows, in bytes (docs/gpu.md)."""

from __future__ import annotations

import torch

from .config import EngineConfig
from .graphs import buckets_for
from .model import LAST_QUERIES
from .weight_only import NONE

# What cannot be counted: cuBLAS work spaces (32 MiB a stream on Hopper), graphs, and blocks that the allocator splits.
RESERVE_BYTES = 1 << 30
ROW_COPIES = 2  # layers of a prompt whose rows wait for their copy to the host (device_cache.py)


def prefill_bytes(config: EngineConfig, dtype: torch.dtype, tokens: int) -> int:
    """What the prefill of a prompt of `tokens` tokens allocates at most."""
    model, chunk = config.model, min(config.prefill_chunk_tokens, tokens)
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    whole = model.hidden_size + 2 * keys + ROW_COPIES * 2 * keys  # residual stream, a layer's keys and values, copies
    attention = 3 * queries + 2 * keys + 2 * model.hidden_size  # qkv, rotated queries, output; norm and projection
    mlp = 3 * model.intermediate_size + 2 * model.hidden_size
    numbers = tokens * whole + chunk * max(attention, mlp) + 2 * min(LAST_QUERIES, tokens) * queries
    if dtype is torch.float32:
        numbers += 2 * tokens * queries  # keys and values of every query head (attention.py)
    if config.weight_only_precision != NONE:
        queries_and_rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        numbers += model.hidden_size * max(
            2 * model.intermediate_size, queries_and_rows
        )  # the largest matrix, dequantised
    return numbers * dtype.itemsize


def decode_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """What the decode steps of all buckets hold: logits, the activations of one layer of the largest, an eviction."""
    model, sizes = config.model, buckets_for(config.max_batch_size)
    layer = 4 * model.hidden_size + 3 * model.intermediate_size
    layer += (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    eviction = 3 * model.num_layers * model.num_kv_heads * config.cache.update * model.head_dim  # rows; keys once more
    return (sum(sizes) * model.vocab_size + sizes[-1] * layer + eviction) * dtype.itemsize


def work_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """All of it, for prompts of up to max_input_len tokens, one prefill at a time."""
    return RESERVE_BYTES + prefill_bytes(config, dtype, config.max_input_len) + decode_bytes(config, dtype)
