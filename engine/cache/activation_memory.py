"""Device memory that an engine needs beside weights, index, windows and rows, in bytes (docs/gpu.md)."""

from __future__ import annotations

import torch

from kvseek.core.config import EngineConfig
from kvseek.engine.model.graphs import buckets_for
from kvseek.engine.model.weight_only import NONE
from kvseek.plugins.contract import LAST_QUERIES

# What cannot be counted: cuBLAS work spaces (32 MiB a stream on Hopper), graphs, and blocks that the allocator splits.
RESERVE_BYTES = 1 << 30
TOKEN_BYTES = 8  # of a prompt's token for a plan: its id and position
LOGITS_BYTES = 4  # of a plan's logit
ROW_COPIES = 2  # layers of a prompt whose rows wait for their copy to the host (cache.py)


def prefill_bytes(config: EngineConfig, dtype: torch.dtype, tokens: int) -> int:
    """What the prefill of a prompt of `tokens` tokens allocates at most, work space of TensorRT's plans left out."""
    chunk, plans = min(config.prefill_chunk_tokens, tokens), config.runtime == "tensorrt"
    numbers = (_plans_prefill if plans else _torch_prefill)(config, tokens, chunk)
    queries = config.model.num_heads * config.model.head_dim
    numbers += 2 * min(LAST_QUERIES, tokens) * queries
    if dtype is torch.float32:
        numbers += 2 * tokens * queries  # keys and values of every query head (attention.py)
    return numbers * dtype.itemsize + TOKEN_BYTES * tokens * plans


def _torch_prefill(config: EngineConfig, tokens: int, chunk: int) -> int:
    """Numbers: the residual stream, a layer's rows, and the activations of a chunk."""
    model = config.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 3 * queries + 2 * keys + 2 * model.hidden_size  # qkv, rotated queries, output; norm and projection
    mlp = 3 * model.intermediate_size + 2 * model.hidden_size
    numbers = tokens * (model.hidden_size + _row_numbers(keys)) + chunk * max(attention, mlp)
    if config.weight_only_precision != NONE:  # the largest matrix, dequantised
        numbers += model.hidden_size * max(2 * model.intermediate_size, queries + 2 * keys)
    return numbers


def _plans_prefill(config: EngineConfig, tokens: int, chunk: int) -> int:
    """Numbers: what goes from plan to plan, if there are several, a layer's rows, and attention's output."""
    model = config.model
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if config.tensorrt.form == "engine":  # in one call: only attention is outside of the plan
        return tokens * (_row_numbers(keys) + queries)
    kept = model.hidden_size + queries + model.head_dim  # residual stream, attended, cosines and sines
    made = 3 * queries + 2 * keys + model.hidden_size  # a plan's outputs; attention's, and that in order
    return tokens * (_row_numbers(keys) + kept) + chunk * made


def _row_numbers(keys: int) -> int:
    """Numbers per token of a layer's keys and values, and of their copies."""
    return (1 + ROW_COPIES) * 2 * keys


def decode_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """What the decode steps of all buckets hold: logits, the activations of one layer of the largest, an eviction."""
    model, sizes = config.model, buckets_for(config.max_batch_size)
    layer = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if config.runtime == "tensorrt":  # residual stream in and out, cosines and sines, logits as the plan gives them
        layer += 2 * model.hidden_size + model.head_dim + LOGITS_BYTES // dtype.itemsize * model.vocab_size
    else:
        layer += 4 * model.hidden_size + 3 * model.intermediate_size
    eviction = 3 * model.num_layers * model.num_kv_heads * config.cache.update * model.head_dim  # rows; keys once more
    return (sum(sizes) * model.vocab_size + sizes[-1] * layer + eviction) * dtype.itemsize


def pack_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """What a pack of short prompts keeps while a unit of a long prompt runs: all but the activations of a unit."""
    model, tokens = config.model, min(config.prefill_chunk_tokens, config.max_input_len)
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if config.runtime == "tensorrt":
        if config.tensorrt.form == "engine":
            return 0  # a prompt is one unit, so nothing is kept between two
        return _plans_prefill(config, tokens, 0) * dtype.itemsize + TOKEN_BYTES * tokens
    numbers = tokens * (model.hidden_size + _row_numbers(keys) + queries)  # a layer's queries, for its index
    return numbers * dtype.itemsize + tokens * model.head_dim * torch.float32.itemsize  # cosines and sines


def work_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """All of it, for prompts of up to max_input_len tokens: a long one at a time, and a pack of short ones beside it."""
    prefills = prefill_bytes(config, dtype, config.max_input_len) + pack_bytes(config, dtype)
    return RESERVE_BYTES + prefills + decode_bytes(config, dtype)
