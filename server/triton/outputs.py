"""Arrays of a model's outputs, of TensorRT-LLM's types and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

OUTPUT_DTYPES = {
    "text_output": object,
    "finish_reason": object,
    "output_ids": np.int32,
    "sequence_length": np.int32,
    "num_input_tokens": np.int32,
    "num_output_tokens": np.int32,
    "cached_tokens": np.int32,
    "attended_tokens": np.float32,
    "prefill_progress": np.float32,
    "cum_log_probs": np.float32,
    "output_log_probs": np.float32,
    "context_logits": np.float32,
    "generation_logits": np.float32,
    "batch_index": np.int32,
    "sequence_index": np.int32,
    "kv_cache_alloc_new_blocks": np.int32,
    "kv_cache_reused_blocks": np.int32,
    "kv_cache_missed_blocks": np.int32,
    "kv_cache_alloc_total_blocks": np.int32,
    "arrival_time_ns": np.int64,
    "first_scheduled_time_ns": np.int64,
    "first_token_time_ns": np.int64,
    "last_token_time_ns": np.int64,
    "acceptance_rate": np.float32,
    "total_accepted_draft_tokens": np.int32,
    "total_draft_tokens": np.int32,
    "stop_reason": object,
    "cumulative_logprob": np.float32,
    "kv_cache_reused_block": np.int32,
    "kv_cache_missed_block": np.int32,
    "kv_cache_hit_rate": np.float32,
}
LISTS = ("output_ids", "output_log_probs")  # [1, 1, n]: request, beam, tokens


def as_tensor(name: str, value: Any, batched: bool) -> np.ndarray[Any, Any]:
    """Make the array of an output for Triton, of TensorRT-LLM's shape.

    That is [1, 1, n] for LISTS, [1] for text and for outputs of a model without a batch dimension, [1, ...] for what is an array
    already, else [1, 1].
    """
    dtype: Any = OUTPUT_DTYPES[name]
    if isinstance(value, np.ndarray):
        return value.astype(dtype, copy=False)[None]
    if name in LISTS:
        return np.asarray(value, dtype=dtype).reshape(1, 1, -1)
    array = np.array([[str(value).encode("utf-8") if dtype is object else value]], dtype=dtype)
    return array if batched and name != "text_output" else array[0]
