"""Tensors of Triton: values of a model's inputs, and arrays of its outputs, of TensorRT-LLM's types and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvseek.core.errors import RequestError
from kvseek.server.requests.models import Logits
from kvseek.server.requests.translation import Inputs

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

    That is [1, 1, n] for LISTS, [1] for text and for outputs of a model without a batch dimension, [1, ...] for logits, else
    [1, 1].
    """
    dtype: Any = OUTPUT_DTYPES[name]
    if isinstance(value, Logits):
        return np.frombuffer(value.data, dtype).reshape(1, *value.shape)
    if name in LISTS:
        return np.asarray(value, dtype=dtype).reshape(1, 1, -1)
    array = np.array([[str(value).encode("utf-8") if dtype is object else value]], dtype=dtype)
    return array if batched and name != "text_output" else array[0]


def rows_of(tensors: Mapping[str, NDArray[Any]]) -> list[Inputs]:
    """Return the inputs of each prompt from tensors, [batch, ...] each; raises RequestError.

    A float32 becomes the shortest number that it can stand for, which is what the client has written: 0.1, not 0.10000000149.
    """
    batch = max(tensor.shape[0] for tensor in tensors.values())
    for name, tensor in tensors.items():
        if tensor.shape[0] != batch:
            raise RequestError(f"{name} has {tensor.shape[0]} rows: must be {batch}, one for each prompt; send as many")
    return [{name: _values(tensor[row : row + 1]) for name, tensor in tensors.items()} for row in range(batch)]


def _values(tensor: NDArray[Any]) -> list[Any]:
    flat = tensor.reshape(-1)
    return [float(str(value)) for value in flat] if flat.dtype == np.float32 else flat.tolist()
