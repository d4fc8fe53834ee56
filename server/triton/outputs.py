"""Tensors of Triton: values of a model's inputs, and arrays of its outputs, of TensorRT-LLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvseek.core.errors import RequestError
from kvseek.server.requests.models import Logits
from kvseek.server.requests.translation import Inputs

LISTS = ("output_ids", "output_log_probs")  # [1, 1, n]: request, beam, tokens


def as_tensor(name: str, value: Any, dtype: Any, batched: bool) -> np.ndarray[Any, Any]:
    """Make the array of an output for Triton, of the type that the model's configuration states and of TensorRT-LLM's shape.

    That is [1, 1, n] for LISTS, [1] for text and for outputs of a model without a batch dimension, [1, ...] for logits, else
    [1, 1].
    """
    if isinstance(value, Logits):
        return np.frombuffer(value.data, dtype).reshape(1, *value.shape)
    if name in LISTS:
        return np.asarray(value, dtype=dtype).reshape(1, 1, -1)
    array = np.array([[value.encode("utf-8") if isinstance(value, str) else value]], dtype=dtype)
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
