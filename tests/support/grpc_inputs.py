"""Requests to Triton's models by tritonclient."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tests.support.waiting import SECONDS

UNSIGNED = ("seed", "random_seed")
DTYPES: dict[str, Any] = {"BYTES": object, "BOOL": bool, "UINT64": np.uint64, "FP32": np.float32, "INT32": np.int32}


def grpc_input(name: str, datatype: str, values: Any) -> grpc.InferInput:
    """The input of a datatype, with the shape that the nested lists `values` have."""
    array = np.array(values, DTYPES[datatype])
    tensor = grpc.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def stream_infer(url: str, model: str, inputs: Sequence[grpc.InferInput]) -> list[Any]:
    """Results of a request by ModelStreamInfer, until Triton says that one is the last; raises its error."""
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    found: list[Any] = []
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        while not found or not found[-1].get_response().parameters["triton_final_response"].bool_param:
            result, error = arrived.get(timeout=SECONDS)
            if error is not None:
                raise error
            found.append(result)
        client.stop_stream()
    return found


def inputs_of(fields: dict[str, Any]) -> list[grpc.InferInput]:
    """Inputs of a batch of one, [1, n] each; the datatypes follow from the values, but for those that are unsigned."""
    return [_input_of(name, value if isinstance(value, list) else [value]) for name, value in fields.items()]


def _input_of(name: str, values: list[Any]) -> grpc.InferInput:
    if isinstance(values[0], bytes | str):
        return grpc_input(name, "BYTES", [[item.encode() if isinstance(item, str) else item for item in values]])
    if isinstance(values[0], bool):
        return grpc_input(name, "BOOL", [values])
    if name in UNSIGNED:
        return grpc_input(name, "UINT64", [values])
    return grpc_input(name, "FP32" if isinstance(values[0], float) else "INT32", [values])
